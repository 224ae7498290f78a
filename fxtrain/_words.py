"""Text that is equal for values that are bitwise equal.

`repr` does not serve: torch, NumPy and pandas shorten it, so that two arrays that differ in the
middle look alike, and objects without their own `repr` show an address.
"""

import ctypes
import dataclasses
import enum
import hashlib
import sys
import types
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

_MAX_DEPTH = 100  # a value that contains itself has no end
_EXACT = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range}
    | {torch.dtype, torch.device, torch.Size}
)
_CONTAINERS = frozenset({tuple, list, dict, set, frozenset})
_GLOBAL = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_MAX_LENGTH = 10_000  # bits of an integer in decimal; more is slow, or refused by Python


def canonical_text(value: Any) -> str:
    """Describe a value by text that only equal values share.

    Tensors and arrays are described by dtype, shape and a digest of their bytes, records and
    containers by their parts (dicts and sets in any order), functions and classes by their names,
    every other object by its pickled state. Plain values look as in `repr`.

    Effects:
        Waits for tensors on a device and copies them.

    Example:
        >>> canonical_text({"b": (1, 2.5), "a": "x"})
        "{'a': 'x', 'b': (1, 2.5)}"
        >>> canonical_text(torch.zeros(2000)) == canonical_text(torch.zeros(2000))
        True
    """
    return _canonical(value, 0)


def _canonical(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in _EXACT:
        large = kind is int and value.bit_length() > _MAX_LENGTH
        return hex(value) if large else repr(value)
    if depth > _MAX_DEPTH:
        return f"{kind.__qualname__}(...)"
    if kind in _CONTAINERS:
        return _container(value, depth)
    if isinstance(value, Tensor):
        return _tensor(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _array(value, depth)
    if isinstance(value, _GLOBAL):
        return _name(value)
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if attrs.has(kind) or dataclasses.is_dataclass(value):
        fields: Any = attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(value)
        parts = [f"{f.name}={_canonical(getattr(value, f.name), depth + 1)}" for f in fields]
        return f"{kind.__qualname__}({', '.join(parts)})"
    return _object(value, depth)


def _container(value: Any, depth: int) -> str:
    kind = type(value)
    if kind is dict:
        return f"{{{_pairs(value.items(), depth)}}}"
    inside = [_canonical(item, depth + 1) for item in value]
    if kind is list:
        return f"[{', '.join(inside)}]"
    if kind is tuple:
        return f"({', '.join(inside)}{',' * (len(inside) == 1)})"
    return f"{kind.__name__}({', '.join(sorted(inside))})"


def _pairs(items: Iterable[tuple[Any, Any]], depth: int) -> str:
    pairs = [(_canonical(key, depth + 1), _canonical(item, depth + 1)) for key, item in items]
    return ", ".join(f"{key}: {item}" for key, item in sorted(pairs))


def _tensor(value: Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    plain = value.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    # Read as plain memory, since torch cannot view every tensor as bytes.
    data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
    return f"{dtype}{list(value.shape)}{_mark(data)}"


def _array(value: Any, depth: int) -> str:
    """A NumPy array or scalar; an object array by its objects."""
    inside = value.tobytes()
    if value.dtype.hasobject:
        inside = _canonical(value.tolist(), depth + 1).encode(errors="surrogatepass")
    mask = getattr(value, "mask", None)  # a masked array
    hidden = "" if mask is None else f" hiding {_canonical(mask, depth + 1)}"
    shape = list(value.shape)
    return f"{type(value).__qualname__} {value.dtype}{shape}{_mark(inside)}{hidden}"


def _mark(data: bytes) -> str:
    return f"#{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _name(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    name = f"{value.__module__}.{value.__qualname__}"
    return repr(value) if "<" in name else name  # a closure, which differs from call to call


def _object(value: Any, depth: int) -> str:
    kind = type(value)
    try:
        taken: Any = value.__reduce_ex__(4)
    except Exception:  # any error of the object's own code
        return repr(value)  # of objects that cannot be sent or compared
    if isinstance(taken, str):  # the name of a constant, such as a dtype
        return f"{kind.__qualname__} {taken}"
    parts = list(taken)
    # Entries that follow are those of a list, and pairs those of a dict.
    follow = [*parts[3:5], None, None][:2]
    said = [_canonical(part, depth + 1) for part in parts[1:3]]
    said += [f"[{', '.join(_canonical(x, depth + 1) for x in follow[0])}]"] if follow[0] else []
    said += [f"{{{_pairs(follow[1], depth)}}}"] if follow[1] else []
    return f"{kind.__qualname__}({'; '.join(said)})"
