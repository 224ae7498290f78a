"""What readers of other libraries' checkpoints return, and checks that they share."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fxtrain._display import brief
from fxtrain._reading import read_text
from fxtrain._record import shown
from fxtrain.errors import CheckpointError, FxError
from fxtrain.models.tensor_sources import inside

_LONGEST_NAME = 4096  # bytes of a file that names the latest checkpoint


def _empty() -> dict[str, Any]:
    return {}


@attrs.frozen(kw_only=True, eq=False)
class Imported:
    """The contents of a checkpoint of another library.

    Attributes:
        models: Full tensors by name for each model, on the CPU. Those that DeepSpeed trains are
            the fp32 masters; those of Megatron have the names of transformers.
        tied: Further names of tensors of the only model, each with its name in `models`.
        optimizers: A state dict per optimizer. DeepSpeed's name their parameters, except at stage
            0 in full precision; others number or name them, as they were saved.
        schedulers: A state dict per scheduler.
        scaler: State dict of the loss scaler, or None.
        updates: Updates so far, or None if the files do not say.
        config: Of Megatron, fields of the config of transformers, for
            `AutoConfig.for_model(**config)`.
        others: Further entries of a `torch.distributed.checkpoint`, by name.
    """

    models: tuple[Mapping[str, Tensor], ...] = attrs.field(repr=brief)
    tied: Mapping[str, str] = attrs.field(factory=_empty, repr=brief)
    optimizers: tuple[Mapping[str, Any], ...] = attrs.field(default=(), repr=brief)
    schedulers: tuple[Mapping[str, Any], ...] = attrs.field(default=(), repr=brief)
    scaler: Mapping[str, Any] | None = attrs.field(default=None, repr=brief)
    updates: int | None = None
    config: Mapping[str, Any] = attrs.field(factory=_empty)
    others: Mapping[str, Any] = attrs.field(factory=_empty, repr=brief)


@contextmanager
def expected_layout(path: Path, layout: str) -> Iterator[None]:
    """Raise a CheckpointError for whatever unexpected contents make a reader raise."""
    try:
        yield
    except FxError:
        raise
    except Exception as error:  # damaged pickles may raise anything
        raise CheckpointError(
            f"{path} is damaged, or does not have the layout of {layout} "
            f"({type(error).__name__}: {str(error)[:500]}).",
            code="FX602",
        ) from error


def named_folder(root: Path, file: str, to_name: Callable[[str], str] = str) -> Path:
    """The folder in `root` of the latest checkpoint, named by the text of a file there."""
    name = to_name(text := read_text(inside(root, file), _LONGEST_NAME).strip())
    if not name or Path(name).name != name or not (root / name).is_dir():
        raise CheckpointError(
            f"{root / file} names {shown(text)}, which is not a folder in {root}."
        )
    return root / name


def in_order(by_number: Mapping[int, Any], root: Path, what: str) -> tuple[Any, ...]:
    """The contents of numbered files, of which none may be missing."""
    if sorted(by_number) != list(range(len(by_number))):
        raise CheckpointError(
            f"{root} contains {what} {sorted(by_number)}, but not those in between. Copy all files."
        )
    return tuple(by_number[number] for number in sorted(by_number))


def named_tensors(table: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The table, after checking that it has tensors by name."""
    for name, value in table.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"{shown(name)} is not a tensor")
    return dict(table)
