"""Aim."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, library, picture


@record
class Aim:
    """Aim.

    Attributes:
        experiment: Name of the experiment; by default the library's own.
        init: Arguments of `aim.Run`, beside fxtrain's or in place of them. By default, the
            repository (`repo`) is `aim` in the run's folder.
    """

    kind: Literal["aim"] = attrs.field(default="aim", init=False)
    experiment: str | None = None
    init: Mapping[str, object] = arguments()


def _open(config: Aim, start: Start) -> Any:
    own = {
        "repo": str(start.folder / "aim"),
        "experiment": config.experiment,
        "system_tracking_interval": None,
        "capture_terminal_logs": False,
        "log_system_params": False,
    }
    run = library(Aim, "aim").Run(start.identity or None, **{**own, **config.init})
    run.name = start.name
    return run


def _write(native: Any, entry: Entry) -> None:
    if entry.kind == "params":
        native["hparams"] = dict(entry.value)
        return
    values = entry.value if entry.kind == "log" else {entry.name: entry.value}
    for name, value in values.items():
        if entry.kind == "text":
            value = library(Aim, "aim").Text(value)
        elif entry.kind == "image":
            value = library(Aim, "aim").Image(picture(Aim, value))
        native.track(value, name=name, step=entry.step, epoch=entry.epoch)


AIM = Tracker(
    name="Aim",
    config=Aim,
    package="aim",
    kinds=("params", "log", "text", "image"),
    open=_open,
    write=_write,
    close=lambda native, failed: native.close(),
    identity=lambda native: native.hash,
)
