"""What plain transformers needs to read an export with quantised layers, and where it cannot."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from fxtrain.precision import TORCHAO, Library, quantized_layers, torchao_config

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: "float32"}
# The end of a name in a pattern of transformers.
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def transformers_config(module: Any) -> dict[str, Any] | None:
    """What the config.json of a transformers model says of its quantised layers.

    Returns:
        None if there are none, or if transformers does not read their format.
    """
    first = next(quantized_layers(module), None)
    if first is None:
        return None
    _, part, library = first
    if library.name == "bitsandbytes":
        return _bitsandbytes(module, part, library)
    described = torchao_config(part)
    if described is None:
        return None
    return {
        "quant_method": "torchao",
        "quant_type": {"default": described},
        "modules_to_not_convert": _unquantized(module),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }


def _bitsandbytes(module: nn.Module, part: nn.Module, library: Library) -> dict[str, Any]:
    settings, facts = library.settings(part), library.facts(part)
    found: dict[str, Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": settings["kind"] == "bnb4",
        "load_in_8bit": settings["kind"] == "bnb8",
        # Without a list, transformers skips what it takes for the output head.
        "llm_int8_skip_modules": _unquantized(module),
    }
    if settings["kind"] == "bnb8":
        return found | {"llm_int8_threshold": settings["threshold"]}
    return found | {
        "bnb_4bit_quant_type": facts["quant_type"],
        "bnb_4bit_use_double_quant": "nested_blocksize" in facts,
        "bnb_4bit_compute_dtype": _DTYPES[settings["compute"]],
        "bnb_4bit_quant_storage": "uint8",
    }


def warn_of_readers(module: Any) -> None:
    """Warn that plain transformers cannot read the export of a transformers model."""
    if not hasattr(module, "from_pretrained"):
        return
    problem = _problem(module)
    if problem is not None:
        warnings.warn(
            f"export: {problem}; fx.load_model reads these files.", UserWarning, stacklevel=3
        )


def _problem(module: nn.Module) -> str | None:
    if getattr(module, "peft_config", None):
        return (
            "from_pretrained does not know the names of a model with adapters of peft. Its own "
            "save_pretrained writes the adapters for it"
        )
    layers = list(quantized_layers(module))
    formats = {library.format(part): name for name, part, library in reversed(layers)}
    for name, part, library in layers:
        if library is TORCHAO and torchao_config(part) is None:
            return (
                f"{name} and other layers are {library.format(part)}, and from_pretrained does not "
                f"read them"
            )
    if len(formats) > 1:
        found = " and ".join(formats)
        return f"from_pretrained reads one format, and this model has layers in {found}"
    skipped = [*_unquantized(module), *(getattr(module, "_keep_in_fp32_modules", None) or ())]
    for name, _, _ in layers:
        if (key := _matching(skipped, name)) is not None:
            return (
                f"{name} is quantised, and from_pretrained does not read it, since it takes the "
                f"name for that of {key}, which is not"
            )
    return None


def _unquantized(module: nn.Module) -> list[str]:
    """The layers that transformers would quantise, and that are not."""
    quantized = {name for name, _, _ in quantized_layers(module)}
    return [
        name
        for name, part in module.named_modules()
        if name not in quantized
        and (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
    ]


def _matching(patterns: Iterable[str], name: str) -> str | None:
    """The first pattern for which transformers skips a module of some name."""
    return next(
        (key for key in patterns if re.match(f"(?:{key}){_BOUNDARY}", name) or name.endswith(key)),
        None,
    )
