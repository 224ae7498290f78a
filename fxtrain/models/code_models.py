"""Build models from configs and code, without memory for their tensors."""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import attrs
import torch

from fxtrain._optional import optional
from fxtrain._reading import read_file
from fxtrain._record import closest
from fxtrain.errors import PlanError
from fxtrain.state.parsing import parse_json

_MAX_BYTES = 100_000_000  # bytes of an index or a config
_MAX_REASON_LENGTH = 500  # characters of another library's message
_ON_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")  # NAME or OWNER/NAME
_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth")  # no timm model name ends in these


@attrs.frozen(kw_only=True)
class KvCache:
    """The shape of a transformer's key-value cache."""

    layers: int
    heads: int  # of keys and values, after grouping
    head_dim: int

    def nbytes(self, each: float, tokens: int) -> float:
        """Bytes of the keys and values of this many tokens, with `each` bytes per element."""
        return 2 * self.layers * self.heads * self.head_dim * each * tokens


def build_on_meta(source: str | os.PathLike[str]) -> Any:
    """Build the model of a transformers config, `module:function` or timm name on the meta device.

    That code is imported and runs. A source that is none of these or fails is a PlanError.
    """
    path = Path(source)
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise PlanError(
                f"{path} contains no .safetensors file and no config.json. Pass a model file, or "
                f"module:function."
            )
        return _build_transformers(config)
    if os.path.exists(path):
        return _build_transformers(path)
    name = str(source)
    return _build_function(name) if ":" in name else _build_timm(name)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; a PlanError if it has none."""
    try:
        data = parse_json(read_file(path, _MAX_BYTES))
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error}.") from error
    except ValueError as error:
        raise PlanError(f"{path} is not JSON: {str(error)[:_MAX_REASON_LENGTH]}.") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path}: expected a JSON object, found {type(data).__name__}.")
    return data


def _build_transformers(path: Path) -> Any:
    known = read_json(path)
    package = optional("transformers", extra="models", needed_by=f"the config {path}")
    try:
        config = package.AutoConfig.from_pretrained(path, local_files_only=True)
        named = getattr(package, str((known.get("architectures") or [""])[0]), None)
        return _on_meta(lambda: named(config) if named else package.AutoModel.from_config(config))
    except Exception as error:  # transformers and the model may raise anything
        reason = f"{type(error).__name__}: {str(error)[:_MAX_REASON_LENGTH]}"
        raise PlanError(f"{path}: transformers cannot build this model: {reason}") from error


def _build_function(source: str) -> Any:
    build = _import_function(source)
    try:
        model = _on_meta(build)
    except Exception as error:
        raise PlanError(f"{source} failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"{source} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _import_function(source: str) -> Any:
    """What MODULE:FUNCTION names, also in the current folder."""
    module, _, function = source.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        target: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # any error of code outside fxtrain
        raise PlanError(
            f"{source}: {type(error).__name__}: {error}. Pass a model as module:function."
        ) from error
    for part in function.split("."):
        if not hasattr(target, part):
            raise PlanError(f"{source}: {module} has no {function!r}.{closest(part, dir(target))}")
        target = getattr(target, part)
    return target


def _build_timm(name: str) -> Any:
    if not name or "/" in name or "." in name[:1] or name.endswith(_FILES):
        raise PlanError(f"{name}: no such file or folder. {_ways(name)}")
    if importlib.util.find_spec("timm") is None:
        raise PlanError(
            f"{name}: no such file or folder. {_ways(name)} For the name of a timm model, "
            f"pip install 'fxtrain[models]'."
        )
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        question = f" Did you mean {', '.join(near)}?" if near else ""
        raise PlanError(f"{name}: no such file, folder or timm model.{question} {_ways(name)}")
    return _on_meta(lambda: timm.create_model(name, pretrained=False))


def _ways(name: str) -> str:
    """How to give the headers or the config of a model that is not here."""
    hub = (
        f"For a model on the Hugging Face hub, `fxtrain estimate-memory {name} --download` fetches "
        f"its headers and config, and no weights. Or pass"
    )
    start = hub if _ON_HUB.fullmatch(name) else "Pass"
    return (
        f"{start} its folder, its config.json or .safetensors file, or MODULE:FUNCTION that makes "
        f"the model."
    )


def _on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def cache_of(config: Mapping[str, Any]) -> KvCache | None:
    """The cache shape in a transformers config; None if the config does not contain it."""
    inner = config.get("text_config")
    known = {**config, **inner} if isinstance(inner, Mapping) else config

    def first(*names: str) -> int | None:
        values = [known.get(name) for name in names]
        return next((value for value in values if type(value) is int and value > 0), None)

    layers = first("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    queries = first("num_attention_heads", "n_head", "num_heads", "n_heads")
    width = first("hidden_size", "n_embd", "d_model", "dim")
    head_dim = first("head_dim", "d_kv") or (width // queries if width and queries else None)
    heads = first("num_key_value_heads", "n_kv_heads", "num_kv_heads") or queries
    if not (layers and heads and head_dim):
        return None
    return KvCache(layers=layers, heads=heads, head_dim=head_dim)
