"""Text that is equal for values that are bitwise equal.

`repr` does not serve: torch, NumPy and pandas shorten it, so that two arrays that differ in the
middle look alike, and objects without their own `repr` show an address.
"""

import ctypes
import functools
import hashlib
import sys
import types
from typing import Any

import torch
from torch import Tensor

_MAX_DEPTH = 100  # a value that contains itself has no end
_EXACT = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), range}
    | {torch.dtype, torch.device, torch.Size}
)
_GLOBAL = (type, types.FunctionType, types.BuiltinFunctionType)
_MAX_LENGTH = 10_000  # bits of an integer in decimal; more is slow, or refused by Python


def canonical_text(value: Any) -> str:
    """Describe a value by text that only equal values share; waits for tensors on a device.

    Tensors and arrays are described by dtype, shape and a digest of their bytes, containers by
    their parts (dicts and sets in any order), functions and classes by their names, every other
    object by its pickled state. Plain values look as in `repr`.

    Example:
        >>> canonical_text({"b": (1, 2.5), "a": "x"})
        "{'a': 'x', 'b': (1, 2.5)}"
        >>> canonical_text(torch.zeros(2000)) == canonical_text(torch.zeros(2000))
        True
    """
    return _canonical(value, 0)


def _canonical(value: Any, depth: int) -> str:
    kind = type(value)
    inside = functools.partial(_canonical, depth=depth + 1)
    if kind in _EXACT:
        large = kind is int and value.bit_length() > _MAX_LENGTH
        return hex(value) if large else repr(value)
    if depth > _MAX_DEPTH:
        return f"{kind.__qualname__}(...)"
    if kind is dict:
        pairs = sorted(f"{inside(key)}: {inside(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if kind in (list, tuple):
        comma = "," * (kind is tuple and len(value) == 1)
        text = f"{', '.join(map(inside, value))}{comma}"
        return f"[{text}]" if kind is list else f"({text})"
    if kind in (set, frozenset):
        return f"{kind.__name__}({', '.join(sorted(map(inside, value)))})"
    if isinstance(value, Tensor):
        return _tensor(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        has_objects = value.dtype.hasobject
        data = inside(value.tolist()).encode() if has_objects else value.tobytes()
        return f"{kind.__qualname__} {value.dtype}{list(value.shape)}{_digest(data)}"
    if isinstance(value, _GLOBAL):
        name = f"{value.__module__}.{value.__qualname__}"
        return repr(value) if "<" in name else name  # a closure, which differs from call to call
    return _object(value, depth)


def _tensor(value: Tensor) -> str:
    plain = value.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    # Read as plain memory, since torch cannot view every tensor as bytes.
    data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{_digest(data)}"


def _digest(data: bytes) -> str:
    return f"#{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _object(value: Any, depth: int) -> str:
    name = type(value).__qualname__
    try:
        taken: Any = value.__reduce_ex__(4)
    except Exception:  # any error of the object's own code
        return repr(value)  # of objects that cannot be sent or compared
    if isinstance(taken, str):  # the name of a constant
        return f"{name} {taken}"
    _, *parts = taken
    # Arguments and state; then entries of a list and pairs of a dict, in any order.
    parts += [None] * (4 - len(parts))
    state = [parts[0], parts[1], list(parts[2] or ()), dict(parts[3] or ())]
    return f"{name}({_canonical(state, depth + 1)})"
