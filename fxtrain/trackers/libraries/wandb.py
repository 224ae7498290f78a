"""Weights & Biases."""

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, array, library


@record
class WandB:
    """Weights & Biases.

    Attributes:
        project: Name of the project; by default the library's own.
        mode: Whether metrics are sent, kept for `wandb sync`, or dropped.
        init: Arguments of `wandb.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["wandb"] = attrs.field(default="wandb", init=False)
    project: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"
    init: Mapping[str, object] = arguments()


def _open(config: WandB, start: Start) -> Any:
    own = {
        "project": config.project,
        "name": start.name,
        "group": start.group,
        "id": start.id,
        "dir": str(start.folder),
        "mode": config.mode,
        # A server appends to the run with this id; a file cannot know its earlier content.
        "resume": "allow" if config.mode == "online" else None,
        # Independent of other runs in this process.
        "reinit": "create_new",
        "settings": {"silent": True, "console": "off"},
    }
    return library(WandB, "wandb").init(**{**own, **config.init})


def _write(native: Any, entry: Entry) -> None:
    wandb = library(WandB, "wandb")
    name, value, step = entry.name, entry.value, entry.step
    match entry.kind:
        case "params":
            native.config.update(dict(value), allow_val_change=True)
        case "log":
            # Axes to plot over, under names that users are unlikely to log.
            axes = {"position/rows": entry.rows, "position/epoch": entry.epoch}
            known = {axis: place for axis, place in axes.items() if place is not None}
            native.log({**known, **value}, step=step)
        case "text":
            native.log({name: wandb.Table(columns=["text"], data=[[value]])}, step=step)
        case "image":
            native.log({name: wandb.Image(array(value))}, step=step)
        case "table":
            table = wandb.Table(columns=value["columns"], data=value["rows"])
            native.log({name: table}, step=step)
        case _:
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name), type="file")
            (artifact.add_dir if value.is_dir() else artifact.add_file)(str(value))
            native.log_artifact(artifact)


WANDB = Tracker(
    name="WandB",
    config=WandB,
    package="wandb",
    open=_open,
    write=_write,
    close=lambda native, failed: native.finish(exit_code=int(failed)),
    identity=lambda native: native.id,
)
