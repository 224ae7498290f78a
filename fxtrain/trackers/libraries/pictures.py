"""Images in the forms that libraries expect."""

from typing import Any

from torch import Tensor

from fxtrain.trackers.tracker import library


def array(image: Tensor) -> Any:
    """A NumPy array of shape (height, width, channels), or (height, width) if it is grey."""
    return (image[..., 0] if image.shape[-1] == 1 else image).numpy()


def picture(config: type, image: Tensor) -> Any:
    """A `PIL.Image`.

    Raises:
        MissingPackageError: pillow is not installed.
    """
    return library(config, "PIL.Image").fromarray(array(image))
