"""Fetch the headers of a model on the Hugging Face hub, at the user's request."""

from pathlib import Path
from typing import Any

from fxtrain._errors import PlanError
from fxtrain._optional import optional
from fxtrain.models.weight_list import Weights, cache_of, read_json, stored_weight

__all__ = ["read_hub"]


def read_hub(name: str) -> Weights:
    """List the tensors of a model on the hub, named as OWNER/NAME.

    Effects:
        Downloads the headers of its safetensors files and its config.json: kilobytes, and no
        tensor.

    Raises:
        PlanError: the hub cannot be reached, or has no safetensors files of this model.
        MissingPackageError: huggingface_hub is needed.
    """
    hub = optional("huggingface_hub", extra="models", needed_by=f"{name} with --download")
    try:
        files = hub.get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # from the hub, its HTTP library, or the system
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise PlanError(f"{name} could not be fetched from the hub: {reason}") from error
    tensors = tuple(
        stored_weight(tensor, about.dtype, about.shape, about.data_offsets)
        for file in files
        for tensor, about in file.tensors.items()
    )
    return Weights(source=name, tensors=tensors, cache=cache_of(_config(hub, name)))


def _config(hub: Any, name: str) -> dict[str, Any]:
    """The config of a model; empty if it has none."""
    try:
        path = Path(hub.hf_hub_download(name, "config.json"))
    except hub.errors.EntryNotFoundError:
        return {}
    return read_json(path)
