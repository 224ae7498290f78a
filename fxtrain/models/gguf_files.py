"""Read GGUF files, those of llama.cpp, as tensors; quantised ones by the package `gguf`."""

import contextlib
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import torch
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._reading import open_file
from fxtrain._record import shown
from fxtrain.errors import CheckpointError
from fxtrain.models.safetensors_files import Entry
from fxtrain.state import Location

_Values = Callable[[str], Tensor]
_Locate = Callable[[str], Location | None]

_MAGIC = b"GGUF"
_MAX_DIMS = 4
_MAX_STRING = 2**24  # bytes of a name or a text; chat templates take kilobytes
_MAX_TENSORS = 2**20
_MAX_HEADER = 2**26  # bytes; a vocabulary takes a few millions
_DEEPEST = 4  # arrays inside arrays
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
# Types of tensors that torch has; all others are quantised.
_DTYPES = {
    0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32,
    27: torch.int64, 28: torch.float64, 30: torch.bfloat16,
}  # fmt: skip

# Names of transformers for the decoders whose parameters llama.cpp stores as they are, but for the
# order of rows of queries and keys in "llama".
_NAMED = ("llama", "qwen2", "qwen3")
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_COMPUTED = ("rope_freqs.weight",)  # transformers computes these from the config


@attrs.frozen(kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        entry: Its name, dtype and shape in the model; quantised tensors are read in fp32.
        kind: The number of its type in the file.
        start: Offset of its first byte in the file.
        nbytes: Bytes in the file.
        heads: Attention heads whose rows are interleaved in the file; 0 if none are.
    """

    entry: Entry
    kind: int
    start: int
    nbytes: int
    heads: int = 0


def gguf_name(name: str, architecture: str) -> str:
    """The name in transformers of a tensor in a GGUF file; unknown ones stay as they are.

    Example:
        >>> from fxtrain.models.gguf_files import gguf_name
        >>> gguf_name("blk.3.attn_q.weight", "llama")
        'model.layers.3.self_attn.q_proj.weight'
    """
    match name.split("."):
        case ["blk", number, part, kind] if architecture in _NAMED and part in _PARTS:
            return f"model.layers.{number}.{_PARTS[part]}.{kind}"
        case [part, kind] if architecture in _NAMED and part in _ENDS:
            return f"{_ENDS[part]}.{kind}"
        case _:
            return name


@contextlib.contextmanager
def open_gguf(
    path: Path,
) -> Iterator[tuple[Mapping[str, Entry], _Values, _Locate]]:
    """Open a GGUF file.

    Yields:
        Its tensors by name; (name) → values; (name) → where these are in the file, or None where
        they are quantised or in another order there.

    Raises:
        CheckpointError: the file is damaged, or has a type that `gguf` does not know.
        MissingPackageError: it has quantised tensors, and the package `gguf` is not installed.
    """
    try:
        with open_file(path) as file:
            tensors = _read_tensors(file, path)
            yield (
                {name: tensor.entry for name, tensor in tensors.items()},
                lambda name: _values(file, path, tensors[name]),
                lambda name: _location(path, tensors[name]),
            )
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error


def _read_tensors(file: BinaryIO, path: Path) -> dict[str, GgufTensor]:
    """Read the header, each size in it before what it counts."""
    header = _Header(file, path)
    if header.take(4) != _MAGIC:
        raise header.problem("it does not begin with 'GGUF'")
    version = header.number("<I")
    if version not in (2, 3):
        raise header.problem(f"its version is {version}, and versions 2 and 3 are known")
    tensors, count = header.number("<Q"), header.number("<Q")
    if tensors > _MAX_TENSORS:
        raise header.problem(f"it claims {tensors} tensors")
    values: dict[str, Any] = {}
    for _ in range(count):
        name = header.string()
        values[name] = header.value(header.number("<I"))
    listed = [header.tensor() for _ in range(tensors)]
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise header.problem(f"its alignment is {shown(alignment)}")
    start = -(-file.tell() // alignment) * alignment
    return _described(listed, values, start, header)


class _Header:
    """Reads the header of a file, with every size checked against what is left of the file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self.size = os.fstat(file.fileno()).st_size

    def problem(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a valid GGUF file: {what}.", code="FX602")

    def take(self, count: int) -> bytes:
        self._check(count)
        return self._file.read(count)

    def _check(self, count: int) -> None:
        if count > min(self.size, _MAX_HEADER) - self._file.tell():
            raise self.problem("it is truncated, or a size in its header is wrong")

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack(kind, self.take(struct.calcsize(kind)))
        return value

    def string(self) -> str:
        length = self.number("<Q")
        if length > _MAX_STRING:
            raise self.problem(f"a text in its header claims {length} bytes")
        return self.take(length).decode(errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of the header; of arrays nothing, since no tensor depends on them."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == _DEEPEST:
            raise self.problem(f"a value in its header has the unknown type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            nbytes = count * struct.calcsize(_SCALARS[inner])
            self._check(nbytes)
            self._file.seek(nbytes, os.SEEK_CUR)
            return None
        for _ in range(count):
            self.value(inner, depth + 1)
        return None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape as torch has it, type, and offset in the data."""
        name, dims = self.string(), self.number("<I")
        if dims > _MAX_DIMS:
            raise self.problem(f"the tensor {shown(name)} has {dims} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dims))[::-1]
        return name, shape, self.number("<I"), self.number("<Q")


def _described(
    listed: list[tuple[str, tuple[int, ...], int, int]],
    values: Mapping[str, Any],
    start: int,
    header: _Header,
) -> dict[str, GgufTensor]:
    architecture = str(values.get("general.architecture", ""))
    heads = values.get(f"{architecture}.attention.head_count")
    by_part = {"attn_q": heads}
    by_part["attn_k"] = values.get(f"{architecture}.attention.head_count_kv", heads)
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in listed:
        nbytes = _bytes_of(name, shape, kind, header)
        if start + offset + nbytes > header.size:
            raise header.problem(f"the tensor {shown(name)} is past the end of the file")
        part = name.split(".")[2] if name.count(".") == 3 else ""
        interleaved = 0
        if architecture == "llama" and part in by_part:
            interleaved = by_part[part]
            if type(interleaved) is not int or not interleaved or shape[0] % (2 * interleaved):
                raise header.problem(f"it has no number of heads that fits {shown(name)}")
        named = gguf_name(name, architecture)
        if named in tensors:
            raise header.problem(f"it lists {shown(name)} twice")
        if named in _COMPUTED and architecture in _NAMED:
            continue
        entry = Entry(name=named, dtype=_DTYPES.get(kind, torch.float32), shape=shape)
        tensors[named] = GgufTensor(
            entry=entry, kind=kind, start=start + offset, nbytes=nbytes, heads=interleaved
        )
    return tensors


def _bytes_of(name: str, shape: tuple[int, ...], kind: int, header: _Header) -> int:
    elements = math.prod(shape)
    if kind in _DTYPES:
        return elements * _DTYPES[kind].itemsize
    library = _library()
    try:
        rows, block = library.GGML_QUANT_SIZES[library.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise header.problem(f"the tensor {shown(name)} has the unknown type {kind}") from None
    if not shape or shape[-1] % rows:
        raise header.problem(f"the rows of {shown(name)} are not a number of blocks")
    return elements // rows * block


def _values(file: BinaryIO, path: Path, tensor: GgufTensor) -> Tensor:
    file.seek(tensor.start)
    raw = bytearray(tensor.nbytes)
    if file.readinto(raw) != tensor.nbytes:  # type: ignore[attr-defined]
        raise CheckpointError(f"{path} has been truncated while it was read.", code="FX602")
    shape, dtype = tensor.entry.shape, tensor.entry.dtype
    if not tensor.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.kind in _DTYPES:
        values = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    else:
        values = _dequantized(raw, path, tensor)
    return _separated(values, tensor.heads) if tensor.heads else values


def _dequantized(raw: bytearray, path: Path, tensor: GgufTensor) -> Tensor:
    library = _library()
    kind = library.GGMLQuantizationType(tensor.kind)
    rows = torch.frombuffer(raw, dtype=torch.uint8).reshape(*tensor.entry.shape[:-1], -1)
    try:
        return torch.from_numpy(library.dequantize(rows.numpy(), kind)).float()
    except RuntimeError as error:
        raise CheckpointError(
            f"{path}: the package gguf cannot convert {tensor.entry.name}, which is {kind.name}. "
            f"Use a file in another type, such as Q8_0 or F16."
        ) from error


def _separated(values: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of transformers: llama.cpp interleaves their halves."""
    half = len(values) // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _location(path: Path, tensor: GgufTensor) -> Location | None:
    if tensor.kind not in _DTYPES or tensor.heads:
        return None
    return Location(
        path=path.absolute(),
        start=tensor.start,
        nbytes=tensor.nbytes,
        dtype=tensor.entry.dtype,
        shape=tensor.entry.shape,
    )


def _library() -> Any:
    return optional("gguf", extra="models", needed_by="A GGUF file with quantised tensors")
