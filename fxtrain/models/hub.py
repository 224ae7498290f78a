"""The headers of a model on the Hugging Face hub, fetched where the user asked for that."""

from pathlib import Path
from typing import Any

from fxtrain._errors import PlanError
from fxtrain._optional import optional
from fxtrain.models.weight_list import Weights, cache_of, read_json, stored_weight

__all__ = ["read_hub"]


def read_hub(name: str) -> Weights:
    """The tensors of a model by its name on the hub, as OWNER/NAME.

    Effects:
        Fetches the headers of its safetensors files and its config.json: kilobytes, and no
        tensor.

    Raises:
        PlanError: the hub cannot be reached, or has no such model in safetensors files.
        MissingPackageError: huggingface_hub is needed.
    """
    hub = optional("huggingface_hub", extra="models", needed_by=f"{name} with --download")
    try:
        files = hub.get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # the hub's, its HTTP library's, and the system's
        said = str(error).strip().splitlines()
        raise PlanError(
            f"{name} was not fetched from the hub: {said[0] if said else type(error).__name__}"
        ) from error
    tensors = tuple(
        stored_weight(tensor, about.dtype, about.shape, about.data_offsets)
        for file in files
        for tensor, about in file.tensors.items()
    )
    return Weights(source=name, tensors=tensors, cache=cache_of(_config(hub, name)))


def _config(hub: Any, name: str) -> dict[str, Any]:
    """Empty for a model that has none, such as one of no transformer."""
    try:
        path = Path(hub.hf_hub_download(name, "config.json"))
    except hub.errors.EntryNotFoundError:
        return {}
    return read_json(path)
