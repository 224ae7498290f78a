"""Trackio."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, array, library


@record
class Trackio:
    """Trackio, which writes to the folder that its variable TRACKIO_DIR names.

    Attributes:
        project: Name of the project; by default the name of the folder that contains the run's.
        space: Hugging Face Space that shows it; None stays on this machine.
        init: Arguments of `trackio.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["trackio"] = attrs.field(default="trackio", init=False)
    project: str | None = None
    space: str | None = None
    init: Mapping[str, object] = arguments()


def _open(config: Trackio, start: Start) -> Any:
    # Trackio identifies a run by its name alone, so the id is a part of it.
    parent = start.folder.resolve().parents[1 if start.rank else 0]
    own = {
        "project": config.project or parent.name or "fxtrain",
        "name": start.identity or f"{start.name}-{start.id[:8]}",
        "group": start.group,
        "space_id": config.space,
        "config": {name: value for name, value in start.params.items() if not name.startswith("_")},
        "resume": "allow",
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }
    return library(Trackio, "trackio").init(**{**own, **config.init})


def _last_steps(native: Any, start: Start) -> dict[str, int]:
    """From the database on this machine; a Space has its own, which cannot be asked."""
    storage = library(Trackio, "trackio.sqlite_storage")
    run = {"project": native.project, "run": native.name, "run_id": native.id}
    last = storage.SQLiteStorage.get_last_step(**run)
    more = 0 if last is None else last - start.position.updates
    if more <= 0:
        return {}
    entries_of = storage.SQLiteStorage.get_snapshot(**run, around_step=last, window=more - 1)
    return {name: max(entry["step"] for entry in entries) for name, entries in entries_of.items()}


def _write(native: Any, entry: Entry) -> None:
    trackio = library(Trackio, "trackio")
    name, value, step = entry.name, entry.value, entry.step
    match entry.kind:
        case "log":
            native.log(dict(value), step=step)
        case "text":
            native.log({name: trackio.Markdown(value)}, step=step)
        case "image":
            native.log({name: trackio.Image(array(value))}, step=step)
        case "table":
            table = trackio.Table(columns=value["columns"], data=value["rows"])
            native.log({name: table}, step=step)
        case _:
            native.log_artifact(str(value), name=name)


def _flush(native: Any) -> None:
    # Its thread writes every half a second, and has no public way to be asked earlier.
    if native._is_local:
        with native._client_lock:
            native._flush_queues_inline()


TRACKIO = Tracker(
    name="Trackio",
    config=Trackio,
    package="trackio",
    kinds=("log", "text", "image", "table", "artifact"),
    open=_open,
    write=_write,
    flush=_flush,
    close=lambda native, failed: native.finish(),
    identity=lambda native: native.name,
    last_steps=_last_steps,
)
