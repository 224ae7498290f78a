"""Aim."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.trackers.libraries.pictures import picture
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


@record
class Aim:
    """Aim.

    Attributes:
        experiment: Name of the experiment; by default the library's own.
        repo: Folder or address of the repository; by default `aim` in the run's folder.
        init: Arguments of `aim.Run`, beside fxtrain's or in place of them.
    """

    kind: Literal["aim"] = attrs.field(default="aim", init=False)
    experiment: str | None = maybe_named()
    repo: str | None = maybe_named()
    init: Mapping[str, object] = arguments()


_NEEDED_BY = "fx.trackers.Aim(...)"


def _library() -> Any:
    return optional("aim", extra="aim", needed_by=_NEEDED_BY)


def _open(config: Aim, start: Start) -> Any:
    repo = str(start.folder / "aim") if config.repo is None else config.repo
    own = {
        "repo": repo,
        "experiment": config.experiment,
        "system_tracking_interval": None,
        "capture_terminal_logs": False,
        "log_system_params": False,
    }
    run = _library().Run(start.identity or None, **{**own, **config.init})
    run.name = start.name
    return run


def _params(native: Any, start: Start) -> None:
    native["hparams"] = dict(start.params)


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    for name, value in values.items():
        native.track(value, name=name, step=at.step, epoch=at.epoch)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.track(_library().Text(text), name=name, step=at.step, epoch=at.epoch)


def _image(native: Any, name: str, image: Tensor, at: At) -> None:
    pil_image = picture(image, extra="aim", needed_by=_NEEDED_BY)
    native.track(_library().Image(pil_image), name=name, step=at.step, epoch=at.epoch)


AIM = Tracker(
    name="Aim",
    config=Aim,
    package="aim",
    open=_open,
    identity=lambda native: native.hash,
    params=_params,
    log=_log,
    text=_text,
    image=_image,
    close=lambda native, failed: native.close(),
)
