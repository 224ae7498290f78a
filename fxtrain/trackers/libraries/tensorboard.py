"""TensorBoard: event files."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, library


@record
class TensorBoard:
    """Event files, written by the package `tensorboard`.

    Attributes:
        init: Arguments of torch's `SummaryWriter`, beside fxtrain's or in place of them.
    """

    kind: Literal["tensorboard"] = attrs.field(default="tensorboard", init=False)
    init: Mapping[str, object] = arguments()


def _open(config: TensorBoard, start: Start) -> Any:
    library(TensorBoard, "tensorboard")
    # TensorBoard hides the events of earlier files from that step on.
    purge = start.position.updates + 1 if start.resumed else None
    own = {"log_dir": str(start.folder / "tensorboard"), "flush_secs": 10, "purge_step": purge}
    init = {**own, **config.init}
    _await_later_name(Path(init["log_dir"]))
    return library(TensorBoard, "torch.utils.tensorboard").SummaryWriter(**init)


def _await_later_name(folder: Path) -> None:
    """Wait until a new event file sorts behind all others: at most a second.

    TensorBoard reads files in the order of their names, which begin with a time in whole seconds,
    and then have a process id.
    """
    now = int(time.time())
    while any(folder.glob(f"events.out.tfevents.{now:010}.*")):
        time.sleep(0.02)
        now = int(time.time())


def _write(native: Any, entry: Entry) -> None:
    name, value, at = entry.name, entry.value, {"global_step": entry.step, "walltime": entry.time}
    match entry.kind:
        case "params":
            summary = library(TensorBoard, "torch.utils.tensorboard.summary")
            plain = {name: str(x) if x is None else x for name, x in value.items()}
            # As `add_hparams` does, which would write them into a separate run.
            for part in summary.hparams(plain, {}):
                native.file_writer.add_summary(part)
        case "log":
            # One event for all values: `add_scalar` makes one each, and takes five times as long.
            proto = library(TensorBoard, "tensorboard.compat.proto.summary_pb2").Summary
            scalars = [proto.Value(tag=name, simple_value=number) for name, number in value.items()]
            native.file_writer.add_summary(proto(value=scalars), entry.step, entry.time)
        case "text":
            native.add_text(name, value, **at)
        case "image":
            native.add_image(name, value.numpy(), **at, dataformats="HWC")
        case _:
            lines = [value["columns"], ["---"] * len(value["columns"]), *value["rows"]]
            text = "\n".join("|".join(["", *(_cell(cell) for cell in line), ""]) for line in lines)
            native.add_text(name, text, **at)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


TENSORBOARD = Tracker(
    name="TensorBoard",
    config=TensorBoard,
    package="tensorboard",
    kinds=("params", "log", "text", "image", "table"),
    open=_open,
    write=_write,
    flush=lambda native: native.flush(),
    close=lambda native, failed: native.close(),
)
