"""Plain values as JSON and back: exactly, without pickle, with tensors stored by name.

A value that JSON cannot express is an object with the key `$`: `{"$": "tuple", "items": [...]}`.
No name in a file is ever imported or called.
"""

import base64
import math
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain.errors import CheckpointError
from fxtrain.state import unstructure

_MAX_DEPTH = 64
_Read = Callable[[str], Any]
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_PLAIN = frozenset({bool, int, type(None)})  # as are texts in ASCII
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decode(data: Any, read: _Read, depth: int = 0) -> Any:
    """Turn the output of `encode` back into values.

    Args:
        read: Name → tensor, or what takes its place.

    Raises:
        CheckpointError: the data was not written by `encode`.
    """
    if not isinstance(data, list | dict):
        return data
    if depth > _MAX_DEPTH:
        raise CheckpointError("A value in the manifest is nested too deeply.", code="FX602")
    if isinstance(data, list):
        return [decode(item, read, depth + 1) for item in data]
    if "$" not in data:
        return {key: decode(item, read, depth + 1) for key, item in data.items()}
    fields = {name: value for name, value in data.items() if name != "$"}
    try:
        return _READERS[data["$"]](lambda item: decode(item, read, depth + 1), read, **fields)
    except CheckpointError:
        raise
    except (LookupError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"A value of type {str(data['$'])[:80]!r} in the manifest is unknown or malformed: "
            f"{type(error).__name__}: {str(error)[:500]}.",
            code="FX602",
        ) from error


def encode(value: Any, path: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Turn a value into JSON, and add its tensors to `tensors` under their paths.

    Args:
        value: None, bool, int, float, str, bytes, tensors, NumPy arrays and scalars, dtypes,
            devices, sizes, paths, tuples, lists, sets, mappings with plain keys, attrs
            records (as `fx.state.unstructure` writes them), and objects with `state_dict()`.
        path: Name of the value, for tensor names and messages.
        tensors: Receives (name, tensor) for each tensor inside.

    Raises:
        CheckpointError: a leaf has another type; the message names it.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is str:
        return value if value.isascii() else _text(value, path)
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"{path[:80]}… is nested more than {_MAX_DEPTH} levels deep, or contains itself. "
            f"Save a flatter value."
        )
    if isinstance(value, Tensor):
        return {"$": "tensor", "name": _put(value, path, tensors)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors, depth + 1)
    if isinstance(value, Enum):  # may be an integer too
        return encode(value.value, path, tensors, depth + 1)
    return _encode_object(value, path, tensors, depth + 1)


# Subclasses count as their bases: a size is a tuple.
_SEQUENCES: tuple[tuple[Any, str], ...] = (
    (tuple, "tuple"),
    (list | deque, "list"),
    (set | frozenset, "set"),
)
_TEXTS: tuple[tuple[Any, str, Callable[[Any], str]], ...] = (
    (torch.dtype, "dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "device", str),
    (bytes | bytearray, "bytes", lambda value: base64.b64encode(value).decode()),
)


def _encode_object(value: Any, path: str, tensors: dict[str, Tensor], depth: int) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    for kind, tag in _SEQUENCES:
        if isinstance(value, kind):
            items = sorted(value, key=repr) if tag == "set" else value
            encoded = [
                # Most are, such as the names of an optimizer's parameters; a call takes longer.
                item
                if type(item) in _PLAIN or (type(item) is str and item.isascii())
                else encode(item, f"{path}.{number}", tensors, depth)
                for number, item in enumerate(items)
            ]
            return encoded if tag == "list" else {"$": tag, "items": encoded}
    for kind, tag, text in _TEXTS:
        if isinstance(value, kind):
            return {"$": tag, "value": text(value)}
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, path, tensors)
    if attrs.has(type(value)) and not isinstance(value, type):
        return encode(unstructure(value), path, tensors, depth)
    if callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        return encode(value.state_dict(), path, tensors, depth)
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        f"saved without pickle. Save tensors, plain values, attrs records or objects with "
        f"state_dict(): for example its fields as a dict."
    )


def _encode_numpy(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value.dtype.kind not in "biufc" or value.dtype.char in "gG":  # long doubles
        raise CheckpointError(
            f"{path} is a NumPy value of dtype {value.dtype}. Save numbers or booleans."
        )
    native = value.astype(value.dtype.newbyteorder("="))  # a copy
    name = _put(torch.as_tensor(native, device="cpu"), path, tensors)
    return {"$": "numpy", "name": name, "scalar": not hasattr(value, "__setitem__")}


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{path} is {text[:80]!r}, which UTF-8 cannot express, as some names of files. Save "
            f"os.fsencode(text), or another text."
        ) from None
    return text


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Name a tensor by its path, made unique: the keys 3 and "3" have the same path."""
    if tensor.is_nested:
        raise CheckpointError(f"{path} is a nested tensor. Save the list of its tensors.")
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _encode_mapping(
    value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor], depth: int
) -> Any:
    if set(map(type, value)) <= {str} and "$" not in value:
        return {
            key if key.isascii() else _text(key, f"{path}, a key"): item
            if type(item) in _PLAIN
            else encode(item, f"{path}.{key}", tensors, depth)
            for key, item in value.items()
        }
    items = [
        [
            encode(key, f"{path}, a key", tensors, depth),
            encode(item, f"{path}.{key}", tensors, depth),
        ]
        for key, item in value.items()
    ]
    return {"$": "dict", "items": items}


def _numpy(read: _Read, name: str, scalar: Any) -> Any:
    array = read(name).numpy()
    if type(scalar) is not bool or (scalar and array.ndim):
        raise ValueError(f"an array of shape {array.shape} is not a scalar")
    return array[()] if scalar else array


# By type tag: (decode an item, read a tensor, the fields of the object) → the value.
_READERS: Mapping[str, Callable[..., Any]] = {
    "tensor": lambda inner, read, name: read(name),
    "numpy": lambda inner, read, name, scalar: _numpy(read, name, scalar),
    "float": lambda inner, read, value: _WORDS[value],
    "dtype": lambda inner, read, value: _DTYPES[value],
    "device": lambda inner, read, value: torch.device(str(value)),
    "bytes": lambda inner, read, value: base64.b64decode(value, validate=True),
    "tuple": lambda inner, read, items: tuple(map(inner, items)),
    "set": lambda inner, read, items: set(map(inner, items)),
    "dict": lambda inner, read, items: {inner(key): inner(value) for key, value in items},
}
