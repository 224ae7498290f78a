"""Load saved user state into objects with the structure it was saved from."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.reading import Reader
from fxtrain.models.tensor_bytes import DTYPES
from fxtrain.state import structure

__all__ = ["SavedTensor", "load_into", "saved_tensor"]


@attrs.frozen(eq=False)
class SavedTensor:
    """A tensor of a checkpoint that is read when it is known where to: whole, or this rank's part.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the full tensor.
        dtype: As it was saved.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    _reader: Reader

    def read(self) -> Tensor:
        """The full tensor, on the CPU."""
        return self._reader.once(self.name)

    def numpy(self) -> Any:
        """The full tensor as an array, for `decode`."""
        return self.read().numpy()

    @torch.no_grad()
    def fill(self, tensor: Tensor) -> Tensor:
        """Fill a tensor of this shape, plain or sharded, and return it detached."""
        target = tensor.detach()
        if target.dtype == self.dtype:
            self._reader.fill(self.name, target)
            return target
        saved = torch.empty_like(target, dtype=self.dtype)
        self._reader.fill(self.name, saved)
        return target.copy_(saved)


def saved_tensor(reader: Reader, name: str) -> SavedTensor:
    """The tensor of a name, without reading it."""
    entry = reader.entry(name)
    return SavedTensor(name, entry.shape, DTYPES[entry.dtype], reader)


def load_into(template: Any, found: Any, path: str = "extra") -> Any:
    """Convert a saved tree to the types of a template, filling tensors and objects in place.

    Args:
        found: Values, and a `SavedTensor` in the place of each tensor.

    Raises:
        CheckpointError: their structures differ; the message names the path.
    """
    if isinstance(template, Tensor):
        if not isinstance(found, SavedTensor) or found.shape != tuple(template.shape):
            what = list(found.shape) if isinstance(found, SavedTensor) else type(found).__name__
            raise CheckpointError(
                f"{path} is a tensor of shape {list(template.shape)} in the template, but was "
                f"saved as {what}. Pass a template with the structure that was saved.",
                code="FX603",
            )
        return found.fill(template)
    if attrs.has(type(template)):
        return structure(_read(found), type(template))
    if callable(getattr(template, "load_state_dict", None)):
        template.load_state_dict(_read(found))
        return template
    if isinstance(template, Mapping):
        if not isinstance(found, Mapping) or template.keys() != found.keys():
            keys = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise CheckpointError(
                f"{path} has the keys {sorted(map(str, template))} in the template, but was saved "
                f"with {keys}. Pass a template with the keys that were saved.",
                code="FX603",
            )
        return {key: load_into(one, found[key], f"{path}.{key}") for key, one in template.items()}
    if isinstance(template, list | tuple) and isinstance(found, list | tuple):
        if len(template) != len(found):
            raise CheckpointError(
                f"{path} has {len(template)} items in the template, but was saved with "
                f"{len(found)}. Pass a template with the items that were saved.",
                code="FX603",
            )
        return type(found)(
            load_into(one, saved, f"{path}.{i}")
            for i, (one, saved) in enumerate(zip(template, found, strict=True))
        )
    return _read(found)


def _read(found: Any) -> Any:
    """A saved tree with its tensors."""
    if isinstance(found, SavedTensor):
        return found.read()
    if isinstance(found, dict):
        return {_read(key): _read(one) for key, one in found.items()}
    if isinstance(found, list | tuple | set):
        return type(found)(map(_read, found))
    return found
