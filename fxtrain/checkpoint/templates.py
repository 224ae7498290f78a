"""The user's saved state put into objects of the shape that it was saved from."""

from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain.state import structure

__all__ = ["load_into"]


def load_into(template: Any, found: Any, path: str = "extra") -> Any:
    """Give a saved tree the types of a template, and fill its tensors and objects in place.

    Raises:
        CheckpointError: the two differ in structure; the message names where.
    """
    if isinstance(template, Tensor):
        if not isinstance(found, Tensor) or found.shape != template.shape:
            raise CheckpointError(
                f"{path} is a tensor of {list(template.shape)} here, and was saved as "
                f"{list(found.shape) if isinstance(found, Tensor) else type(found).__name__}."
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
                f"{path} has the keys {sorted(map(str, template))} here, and was saved with {keys}."
            )
        return {key: load_into(one, found[key], f"{path}.{key}") for key, one in template.items()}
    if isinstance(template, list | tuple) and isinstance(found, list | tuple):
        if len(template) != len(found):
            raise CheckpointError(
                f"{path} has {len(template)} items here, and was saved with {len(found)}."
            )
        return type(found)(
            load_into(one, saved, f"{path}.{i}")
            for i, (one, saved) in enumerate(zip(template, found, strict=True))
        )
    return found
