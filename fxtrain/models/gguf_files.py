"""Read GGUF files, those of llama.cpp: the package `gguf` reads and dequantizes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._reading import open_file
from fxtrain._record import shown
from fxtrain.errors import CheckpointError
from fxtrain.state import FileTensor

# Types of tensors that torch has; all others are quantized.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip
# What the package raises for a damaged file.
_WRONG = (ValueError, LookupError, TypeError, ArithmeticError)

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


def read_gguf(path: Path) -> tuple[dict[str, FileTensor], Callable[[str], Tensor]]:
    """Read the header of a GGUF file, and map its tensors into memory.

    Returns its tensors by name, quantized ones in fp32; those that are neither quantized nor in
    another order there have a place in the file. And (name) → values. Damage is a CheckpointError.
    """
    library = optional("gguf", extra="models", needed_by=f"The GGUF file {path}")
    try:
        open_file(path).close()  # no pipe and no device
        reader = _bounded(library.GGUFReader)(path)
        if reader.byte_order != "I":
            raise ValueError("its bytes are in the order of another kind of machine")
        architecture = _value(reader, "general.architecture")
        listed = {gguf_name(tensor.name, str(architecture)): tensor for tensor in reader.tensors}
        if architecture in _NAMED:
            listed = {name: listed[name] for name in listed if name not in _COMPUTED}
        entries = {
            name: FileTensor(
                name=name,
                dtype=_DTYPES.get(tensor.tensor_type.name, torch.float32),
                shape=tuple(tensor.shape.tolist()[::-1]),
            )
            for name, tensor in listed.items()
        }
        interleaved = _interleaved(reader, entries) if architecture == "llama" else {}
        for name, tensor in listed.items():
            if tensor.tensor_type.name in _DTYPES and name not in interleaved:
                place = {"path": path.absolute(), "start": tensor.data_offset}
                entries[name] = attrs.evolve(entries[name], **place)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    except _WRONG as error:
        raise CheckpointError(
            f"{path} is not a valid GGUF file, or is damaged: {str(error)[:500]}.", code="FX602"
        ) from error

    def values(name: str) -> Tensor:
        tensor, entry = listed[name], entries[name]
        if tensor.tensor_type.name in _DTYPES:
            raw = reader.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
            full = torch.from_numpy(raw.copy()).view(entry.dtype)
        else:
            try:
                full = torch.from_numpy(library.dequantize(tensor.data, tensor.tensor_type)).float()
            except RuntimeError as error:  # a type that it cannot convert
                raise CheckpointError(
                    f"{path}: the package gguf cannot convert {name}, which is "
                    f"{tensor.tensor_type.name}. Use a file in another type, such as Q8_0 or F16."
                ) from error
        full = full.reshape(entry.shape)
        return _separated(full, interleaved[name]) if name in interleaved else full

    return entries, values


def _bounded(reader: Any) -> Any:
    """The reader of `gguf`, for files that may claim more than they have: it would read on."""

    class Bounded(reader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, *order: Any, **more: Any) -> Any:
            values = super()._get(offset, dtype, count, *order, **more)
            if len(values) != count:
                raise ValueError("it is truncated, or a size in its header is wrong")
            return values

    return Bounded


def _value(reader: Any, key: str) -> Any:
    """A number or a text of the header; None if there is no such key."""
    field = reader.get_field(key)
    if field is None:
        return None
    raw = field.parts[field.data[0]]
    return raw.tobytes().decode() if field.types[0].name == "STRING" else raw.tolist()[0]


def _interleaved(reader: Any, entries: Mapping[str, FileTensor]) -> dict[str, int]:
    """The queries and keys of a Llama, each with its number of heads."""
    heads = _value(reader, "llama.attention.head_count")
    groups = _value(reader, "llama.attention.head_count_kv") or heads
    numbers = {"q_proj": heads, "k_proj": groups}
    interleaved = {
        name: int(numbers[name.split(".")[-2]])
        for name in entries
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight"))
    }
    for name, count in interleaved.items():
        if entries[name].shape[0] % (2 * count):
            raise ValueError(f"{shown(name)} does not have {count} heads")
    return interleaved


def _separated(values: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of transformers: llama.cpp interleaves their halves."""
    half = len(values) // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
