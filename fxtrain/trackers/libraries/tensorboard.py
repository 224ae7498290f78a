"""TensorBoard: event files."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._record import above, record
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


@record
class TensorBoard:
    """Event files, written by the package `tensorboard`.

    Attributes:
        folder: Its folder; by default `tensorboard` in the run's folder.
        flush_s: Maximum seconds until a metric is in the file.
        init: Arguments of torch's `SummaryWriter`, beside fxtrain's or in place of them.
    """

    kind: Literal["tensorboard"] = attrs.field(default="tensorboard", init=False)
    folder: str | None = maybe_named()
    flush_s: float = attrs.field(default=10.0, validator=above(0))
    init: Mapping[str, object] = arguments()


_NEEDED_BY = "fx.TensorBoard()"


def _open(config: TensorBoard, start: Start) -> Any:
    optional("tensorboard", extra="tensorboard", needed_by=_NEEDED_BY)
    library = optional("torch.utils.tensorboard", extra="tensorboard", needed_by=_NEEDED_BY)
    # TensorBoard hides the events of earlier files from that step on.
    purge = start.position.updates + 1 if start.resumed else None
    own = {
        "log_dir": str(start.place(config.folder, "tensorboard")),
        "flush_secs": config.flush_s,
        "purge_step": purge,
    }
    return library.SummaryWriter(**{**own, **config.init})


def _params(native: Any, start: Start) -> None:
    summary = optional("torch.utils.tensorboard.summary", extra="tensorboard", needed_by=_NEEDED_BY)
    plain = {name: str(value) if value is None else value for name, value in start.params.items()}
    # As `add_hparams` does, which would write them into a separate run.
    for part in summary.hparams(plain, {}):
        native.file_writer.add_summary(part)


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    # One event for all values: `add_scalar` makes one for each, which takes five times as long.
    proto = optional(
        "tensorboard.compat.proto.summary_pb2", extra="tensorboard", needed_by=_NEEDED_BY
    )
    value = proto.Summary.Value
    scalars = [value(tag=name, simple_value=number) for name, number in values.items()]
    native.file_writer.add_summary(proto.Summary(value=scalars), at.step, at.time)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.add_text(name, text, at.step, walltime=at.time)


def _image(native: Any, name: str, image: Tensor, at: At) -> None:
    native.add_image(name, image.numpy(), at.step, walltime=at.time, dataformats="HWC")


def _table(
    native: Any, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], at: At
) -> None:
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join("|".join(["", *(_cell(value) for value in line), ""]) for line in lines)
    native.add_text(name, text, at.step, walltime=at.time)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


TENSORBOARD = Tracker(
    name="TensorBoard",
    config=TensorBoard,
    package="tensorboard",
    open=_open,
    params=_params,
    log=_log,
    text=_text,
    image=_image,
    table=_table,
    flush=lambda native: native.flush(),
    close=lambda native, failed: native.close(),
)
