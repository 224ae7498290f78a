"""Images in the forms that libraries take."""

from typing import Any

from torch import Tensor

from fxtrain._optional import optional

__all__ = ["array", "picture"]


def array(image: Tensor) -> Any:
    """A NumPy array of shape (height, width, channels), or (height, width) if it is grey."""
    return (image[..., 0] if image.shape[-1] == 1 else image).numpy()


def picture(image: Tensor, *, extra: str, needed_by: str) -> Any:
    """A `PIL.Image`.

    Raises:
        MissingPackageError: pillow is not installed.
    """
    return optional("PIL.Image", extra=extra, needed_by=needed_by).fromarray(array(image))
