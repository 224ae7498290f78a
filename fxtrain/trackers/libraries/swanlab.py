"""SwanLab."""

from collections.abc import Mapping
from typing import Any

from fxtrain._optional import optional
from fxtrain.state import SwanLab
from fxtrain.trackers.libraries.pictures import log_image
from fxtrain.trackers.tracker import At, Start, Tracker

__all__ = ["SWANLAB"]


def _library() -> Any:
    return optional("swanlab", extra="swanlab", needed_by="fx.SwanLab(...)")


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


def _close(native: Any, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    native.finish(state="crashed" if failed else "success")


SWANLAB = Tracker(
    name="SwanLab",
    config=SwanLab,
    package="swanlab",
    open=_open,
    log=_log,
    text=_text,
    image=log_image(_library),
    close=_close,
    closed_by_caller=True,
)
