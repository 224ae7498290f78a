"""Weights & Biases."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.trackers.libraries.pictures import log_image, log_table
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


@record
class WandB:
    """Weights & Biases.

    Attributes:
        project: Name of the project; by default the library's own.
        entity: User or team; None for the account's own.
        group: Groups runs in the interface; if several ranks track, the run by default.
        tags: Words by which to find the run.
        mode: Whether metrics are sent, kept for `wandb sync`, or dropped.
        init: Arguments of `wandb.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["wandb"] = attrs.field(default="wandb", init=False)
    project: str | None = maybe_named()
    entity: str | None = maybe_named()
    group: str | None = maybe_named()
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] = "online"
    init: Mapping[str, object] = arguments()


def _library() -> Any:
    return optional("wandb", extra="wandb", needed_by="fx.WandB(...)")


def _open(config: WandB, start: Start) -> Any:
    own = {
        "project": config.project,
        "entity": config.entity,
        "group": config.group or (start.run if start.everyone else None),
        "tags": list(config.tags),
        "name": start.name,
        "id": start.id,
        "dir": str(start.folder),
        "mode": config.mode,
        # A server appends to the run with this id; a file cannot know its earlier content.
        "resume": "allow" if config.mode == "online" else None,
        # Independent of other runs in this process.
        "reinit": "create_new",
    }
    init = {**own, **config.init}
    settings = init.pop("settings", {})
    if isinstance(settings, Mapping):  # or a `wandb.Settings`
        settings = {"silent": True, "console": "off", **settings}
    return _library().init(**init, settings=settings)


def _params(native: Any, start: Start) -> None:
    native.config.update(dict(start.params), allow_val_change=True)


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    # Axes to plot over, under names that users are unlikely to log.
    axes = {"position/rows": at.rows, "position/epoch": at.epoch}
    known = {name: value for name, value in axes.items() if value is not None}
    native.log({**known, **values}, step=at.step)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.log({name: _library().Table(columns=["text"], data=[[text]])}, step=at.step)


def _artifact(native: Any, name: str, path: Path, at: At) -> None:
    artifact = _library().Artifact(re.sub(r"[^\w.-]", "-", name), type="file")
    if path.is_dir():
        artifact.add_dir(str(path))
    else:
        artifact.add_file(str(path))
    native.log_artifact(artifact)


WANDB = Tracker(
    name="WandB",
    config=WandB,
    package="wandb",
    open=_open,
    identity=lambda native: native.id,
    params=_params,
    log=_log,
    text=_text,
    image=log_image(_library),
    table=log_table(_library),
    artifact=_artifact,
    close=lambda native, failed: native.finish(exit_code=int(failed)),
)
