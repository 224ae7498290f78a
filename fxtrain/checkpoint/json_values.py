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
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def decode(data: Any, read: _Read, depth: int = 0) -> Any:
    """Turn the output of `encode` back into values.

    Args:
        read: Name → tensor, or what takes its place.

    Raises:
        CheckpointError: the data was not written by `encode`.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError("A value in the manifest is nested too deeply.", code="FX602")
    if isinstance(data, list):
        return [decode(item, read, depth + 1) for item in data]
    if not isinstance(data, dict):
        return data
    if "$" not in data:
        return {key: decode(item, read, depth + 1) for key, item in data.items()}
    kind = data["$"] if isinstance(data["$"], str) else type(data["$"]).__name__
    if kind not in _READERS:
        raise CheckpointError(
            f"A value in the manifest has an unknown type {kind[:80]!r}.", code="FX602"
        )
    keys, reader = _READERS[kind]
    try:
        if data.keys() != {"$", *keys}:
            raise KeyError(f"expected the keys {', '.join(keys)}, found {', '.join(data)[:200]}")
        return reader(data, read, depth + 1)
    except CheckpointError:
        raise
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"A value of type {kind!r} in the manifest is malformed: {str(error)[:500]}.",
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
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"{path[:80]}… is nested more than {_MAX_DEPTH} levels deep, or contains itself. "
            f"Save a flatter value."
        )
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Tensor):
        return {"$": "tensor", "name": _put(value, path, tensors)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
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
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors, depth)
    for kind, tag in _SEQUENCES:
        if isinstance(value, kind):
            items = sorted(value, key=repr) if tag == "set" else value
            encoded = [encode(item, f"{path}.{i}", tensors, depth) for i, item in enumerate(items)]
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
    if value.dtype.kind not in "biufc":
        raise CheckpointError(
            f"{path} is a NumPy value of dtype {value.dtype}. Save numbers or booleans."
        )
    name = _put(torch.as_tensor(value.copy(), device="cpu"), path, tensors)
    return {"$": "numpy", "name": name, "scalar": not hasattr(value, "__setitem__")}


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Name a tensor by its path, made unique: the keys 3 and "3" have the same path."""
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _encode_mapping(
    value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor], depth: int
) -> Any:
    if set(map(type, value)) <= {str} and "$" not in value:
        return {key: encode(item, f"{path}.{key}", tensors, depth) for key, item in value.items()}
    items = [
        [
            encode(key, f"{path}, a key", tensors, depth),
            encode(item, f"{path}.{key}", tensors, depth),
        ]
        for key, item in value.items()
    ]
    return {"$": "dict", "items": items}


def _numpy(data: dict[str, Any], read: _Read, depth: int) -> Any:
    array = _tensor(data, read, depth).numpy()
    if type(data["scalar"]) is not bool or (data["scalar"] and array.ndim):
        raise ValueError(f"an array of shape {array.shape} is not a scalar")
    return array[()] if data["scalar"] else array


def _tensor(data: dict[str, Any], read: _Read, depth: int) -> Tensor:
    if not isinstance(data["name"], str):
        raise TypeError("the name is not a string")
    return read(data["name"])


def _items(data: dict[str, Any], read: _Read, depth: int) -> list[Any]:
    if not isinstance(data["items"], list):
        raise TypeError("the items are not a list")
    return [decode(item, read, depth) for item in data["items"]]


def _dict(data: dict[str, Any], read: _Read, depth: int) -> dict[Any, Any]:
    pairs = data["items"]
    if not isinstance(pairs, list) or not all(type(pair) is list for pair in pairs):
        raise TypeError("the items are not a list of lists")
    return {decode(key, read, depth): decode(value, read, depth) for key, value in pairs}


def _device(data: dict[str, Any], *_: Any) -> torch.device:
    if not isinstance(data["value"], str):
        raise TypeError("the device is not a string")
    return torch.device(data["value"])


# By type tag: the keys of the object, and the function that builds the value.
_READERS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any], _Read, int], Any]]] = {
    "tensor": (("name",), _tensor),
    "numpy": (("name", "scalar"), _numpy),
    "float": (("value",), lambda data, *_: _WORDS[data["value"]]),
    "dtype": (("value",), lambda data, *_: _DTYPES[data["value"]]),
    "device": (("value",), _device),
    "bytes": (("value",), lambda data, *_: base64.b64decode(data["value"], validate=True)),
    "tuple": (("items",), lambda *args: tuple(_items(*args))),
    "set": (("items",), lambda *args: set(_items(*args))),
    "dict": (("items",), _dict),
}
