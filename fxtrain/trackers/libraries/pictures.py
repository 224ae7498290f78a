"""Images and tables in the forms that libraries expect."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fxtrain._optional import optional
from fxtrain.trackers.tracker import At


def array(image: Tensor) -> Any:
    """A NumPy array of shape (height, width, channels), or (height, width) if it is grey."""
    return (image[..., 0] if image.shape[-1] == 1 else image).numpy()


def picture(image: Tensor, *, extra: str, needed_by: str) -> Any:
    """A `PIL.Image`.

    Raises:
        MissingPackageError: pillow is not installed.
    """
    return optional("PIL.Image", extra=extra, needed_by=needed_by).fromarray(array(image))


def log_image(library: Callable[[], Any]) -> Callable[[Any, str, Tensor, At], None]:
    """The `image` of a tracker whose library has `Image`, as wandb does."""

    def image(native: Any, name: str, value: Tensor, at: At) -> None:
        native.log({name: library().Image(array(value))}, step=at.step)

    return image


def log_table(
    library: Callable[[], Any],
) -> Callable[[Any, str, Sequence[str], Sequence[Sequence[Any]], At], None]:
    """The `table` of a tracker whose library has `Table`, as wandb does."""

    def table(
        native: Any, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], at: At
    ) -> None:
        value = library().Table(columns=list(columns), data=[list(row) for row in rows])
        native.log({name: value}, step=at.step)

    return table
