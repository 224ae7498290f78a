"""Load saved user state into objects with the structure it was saved from."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain.state import structure

__all__ = ["load_into"]


def load_into(template: Any, found: Any, path: str = "extra") -> Any:
    """Convert a saved tree to the types of a template, filling tensors and objects in place.

    Raises:
        CheckpointError: their structures differ; the message names the path.
    """
    if isinstance(template, Tensor):
        if not isinstance(found, Tensor) or found.shape != template.shape:
            raise CheckpointError(
                f"{path} is a tensor of shape {list(template.shape)} in the template, but was "
                f"saved as "
                f"{list(found.shape) if isinstance(found, Tensor) else type(found).__name__}. "
                f"Pass a template with the structure that was saved."
            )
        return template.detach().copy_(found)
    if attrs.has(type(template)):
        return structure(found, type(template))
    if callable(getattr(template, "load_state_dict", None)):
        template.load_state_dict(found)
        return template
    if isinstance(template, Mapping):
        if not isinstance(found, Mapping) or template.keys() != found.keys():
            keys = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise CheckpointError(
                f"{path} has the keys {sorted(map(str, template))} in the template, but was saved "
                f"with {keys}. Pass a template with the keys that were saved."
            )
        return {key: load_into(one, found[key], f"{path}.{key}") for key, one in template.items()}
    if isinstance(template, list | tuple) and isinstance(found, list | tuple):
        if len(template) != len(found):
            raise CheckpointError(
                f"{path} has {len(template)} items in the template, but was saved with "
                f"{len(found)}. Pass a template with the items that were saved."
            )
        return type(found)(
            load_into(one, saved, f"{path}.{i}")
            for i, (one, saved) in enumerate(zip(template, found, strict=True))
        )
    return found
