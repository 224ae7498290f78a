"""SwanLab."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, array, library


@record
class SwanLab:
    """SwanLab, which allows one run per process.

    Attributes:
        project: Name of the project; by default the library's own.
        mode: cloud sends metrics, local shows them on this machine, offline keeps them for
            `swanlab sync`, disabled drops them.
        init: Arguments of `swanlab.init`, beside fxtrain's or in place of them. By default, the
            folder (`log_dir`) is `swanlab` in the run's.
    """

    kind: Literal["swanlab"] = attrs.field(default="swanlab", init=False)
    project: str | None = None
    mode: Literal["cloud", "local", "offline", "disabled"] = "cloud"
    init: Mapping[str, object] = arguments()


def _open(config: SwanLab, start: Start) -> Any:
    folder = start.folder / "swanlab"
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        "project": config.project,
        "name": start.name,
        "group": start.group,
        "id": start.id,
        "resume": "allow" if config.mode == "cloud" else None,
        "mode": "online" if config.mode == "cloud" else config.mode,
        "log_dir": str(folder),
        "config": dict(start.params),
    }
    return library(SwanLab, "swanlab").init(**{**own, **config.init})


def _write(native: Any, entry: Entry) -> None:
    swanlab = library(SwanLab, "swanlab")
    match entry.kind:
        case "log":
            native.log(dict(entry.value), step=entry.step)
        case "text":
            native.log({entry.name: swanlab.Text(entry.value)}, step=entry.step)
        case _:
            native.log({entry.name: swanlab.Image(array(entry.value))}, step=entry.step)


SWANLAB = Tracker(
    name="SwanLab",
    config=SwanLab,
    package="swanlab",
    kinds=("log", "text", "image"),
    open=_open,
    write=_write,
    close=lambda native, failed: native.finish(state="crashed" if failed else "success"),
    closed_by_caller=True,
)
