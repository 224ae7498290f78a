"""Trackio."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.trackers.libraries.pictures import log_image, log_table
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


@record
class Trackio:
    """Trackio, which writes to the folder that its variable TRACKIO_DIR names.

    Attributes:
        project: Name of the project; by default the name of the folder that contains the run's.
        space: Hugging Face Space that shows it; None stays on this machine.
        init: Arguments of `trackio.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["trackio"] = attrs.field(default="trackio", init=False)
    project: str | None = maybe_named()
    space: str | None = maybe_named()
    init: Mapping[str, object] = arguments()


_NEEDED_BY = "fx.trackers.Trackio(...)"


def _library() -> Any:
    return optional("trackio", extra="trackio", needed_by=_NEEDED_BY)


def _open(config: Trackio, start: Start) -> Any:
    # Trackio identifies a run by its name alone, so the id is a part of it.
    own = {
        "project": config.project or start.folder.resolve().parent.name or "fxtrain",
        "name": start.identity or f"{start.name}-{start.id[:8]}",
        "group": start.run if start.everyone else None,
        "space_id": config.space,
        "config": {name: value for name, value in start.params.items() if not name.startswith("_")},
        "resume": "allow",
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }
    return _library().init(**{**own, **config.init})


def _last_steps(native: Any, start: Start) -> dict[str, int]:
    """From the database on this machine; a Space has its own, which cannot be asked."""
    storage = optional("trackio.sqlite_storage", extra="trackio", needed_by=_NEEDED_BY)
    run = {"project": native.project, "run": native.name, "run_id": native.id}
    last = storage.SQLiteStorage.get_last_step(**run)
    more = 0 if last is None else last - start.position.updates
    if more <= 0:
        return {}
    entries_of = storage.SQLiteStorage.get_snapshot(**run, around_step=last, window=more - 1)
    return {name: max(entry["step"] for entry in entries) for name, entries in entries_of.items()}


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    native.log(dict(values), step=at.step)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.log({name: _library().Markdown(text)}, step=at.step)


def _artifact(native: Any, name: str, path: Path, at: At) -> None:
    native.log_artifact(str(path), name=name)


def _flush(native: Any) -> None:
    # Its thread writes every half a second, and has no public way to be asked earlier.
    if native._is_local:
        with native._client_lock:
            native._flush_queues_inline()


TRACKIO = Tracker(
    name="Trackio",
    config=Trackio,
    package="trackio",
    open=_open,
    identity=lambda native: native.name,
    last_steps=_last_steps,
    log=_log,
    text=_text,
    image=log_image(_library),
    table=log_table(_library),
    artifact=_artifact,
    flush=_flush,
    close=lambda native, failed: native.finish(),
)
