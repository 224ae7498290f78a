"""Trackio."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxtrain._optional import optional
from fxtrain.state import Trackio
from fxtrain.track.libraries.pictures import log_image, log_table
from fxtrain.track.tracker import At, Start, Tracker

__all__ = ["TRACKIO"]


def _library() -> Any:
    return optional("trackio", extra="trackio", needed_by="fx.Trackio(...)")


def _open(config: Trackio, start: Start) -> Any:
    # A run is known by its name alone, so that the id is a part of it.
    return _library().init(
        project=config.project,
        name=start.identity or f"{start.name}-{start.id[:8]}",
        group=start.run if start.everyone else None,
        space_id=config.space,
        config={name: one for name, one in start.params.items() if not name.startswith("_")},
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    native.log(dict(values), step=at.step)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.log({name: _library().Markdown(text)}, step=at.step)


def _artifact(native: Any, name: str, path: Path, at: At) -> None:
    native.log_artifact(str(path), name=name)


def _close(native: Any, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    native.finish()


TRACKIO = Tracker(
    name="Trackio",
    config=Trackio,
    open=_open,
    identity=lambda native: native.name,
    log=_log,
    text=_text,
    image=log_image(_library),
    table=log_table(_library),
    artifact=_artifact,
    close=_close,
)
