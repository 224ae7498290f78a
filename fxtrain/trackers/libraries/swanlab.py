"""SwanLab."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.trackers.libraries.pictures import log_image
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


@record
class SwanLab:
    """SwanLab, which allows one run per process.

    Attributes:
        project: Name of the project; by default the library's own.
        workspace: None for the account's own.
        mode: cloud sends metrics, local shows them on this machine, offline keeps them for
            `swanlab sync`, disabled drops them.
        folder: By default `swanlab` in the run's folder.
        init: Arguments of `swanlab.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["swanlab"] = attrs.field(default="swanlab", init=False)
    project: str | None = maybe_named()
    workspace: str | None = maybe_named()
    mode: Literal["cloud", "local", "offline", "disabled"] = "cloud"
    folder: str | None = maybe_named()
    init: Mapping[str, object] = arguments()


def _library() -> Any:
    return optional("swanlab", extra="swanlab", needed_by="fx.trackers.SwanLab(...)")


def _open(config: SwanLab, start: Start) -> Any:
    folder = start.place(config.folder, "swanlab")
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        "project": config.project,
        "workspace": config.workspace,
        "name": start.name,
        "group": start.run if start.everyone else None,
        "id": start.id,
        "resume": "allow" if config.mode == "cloud" else None,
        "mode": "online" if config.mode == "cloud" else config.mode,
        "log_dir": str(folder),
        "config": dict(start.params),
    }
    return _library().init(**{**own, **config.init})


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    native.log(dict(values), step=at.step)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.log({name: _library().Text(text)}, step=at.step)


SWANLAB = Tracker(
    name="SwanLab",
    config=SwanLab,
    package="swanlab",
    open=_open,
    log=_log,
    text=_text,
    image=log_image(_library),
    close=lambda native, failed: native.finish(state="crashed" if failed else "success"),
    closed_by_caller=True,
)
