"""DVCLive."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

import attrs
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.trackers.libraries.pictures import picture
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


@record
class DVCLive:
    """DVCLive: files that DVC shows. Nothing is committed, and `dvc.yaml` is not written.

    DVCLive itself runs `dvc init` in a git repository that DVC does not know yet.

    Attributes:
        folder: Their folder; by default `dvclive` in the run's folder.
        init: Arguments of `dvclive.Live`, beside fxtrain's or in place of them.
    """

    kind: Literal["dvclive"] = attrs.field(default="dvclive", init=False)
    folder: str | None = maybe_named()
    init: Mapping[str, object] = arguments()


_NEEDED_BY = "fx.trackers.DVCLive()"


def _open(config: DVCLive, start: Start) -> Any:
    library = optional("dvclive", extra="dvclive", needed_by=_NEEDED_BY)
    folder = start.place(config.folder, "dvclive")
    if start.resumed:
        for path in sorted((folder / "plots" / "metrics").rglob("*.tsv")):
            _cut(path, start.position.updates)
    # By default it would write a git commit, a dvc.yaml and a report.
    own = {"report": None, "save_dvc_exp": False, "dvcyaml": None}
    return library.Live(**{"dir": str(folder), "resume": start.resumed, **own, **config.init})


def _cut(path: Any, updates: int) -> None:
    """Remove the lines after a number of updates, which will be logged again."""
    head, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    place = head.rstrip().split("\t").index("step")
    remaining = [line for line in lines if int(line.rstrip("\n").split("\t")[place]) <= updates]
    if len(remaining) < len(lines):
        path.write_text("".join([head, *remaining]), encoding="utf-8")


def _refuses(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return "it is the path of a file inside the folder"
    return ""


def _params(native: Any, start: Start) -> None:
    native.log_params(
        {name: str(value) if value is None else value for name, value in start.params.items()}
    )


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    native.step = at.step
    for name, value in values.items():
        native.log_metric(name, value)
    native.make_summary()


def _image(native: Any, name: str, image: Tensor, at: At) -> None:
    pil_image = picture(image, extra="dvclive", needed_by=_NEEDED_BY)
    native.log_image(f"{name}-{at.step}.png", pil_image)


DVCLIVE = Tracker(
    name="DVCLive",
    config=DVCLive,
    package="dvclive",
    open=_open,
    refuses=_refuses,
    params=_params,
    log=_log,
    image=_image,
    close=lambda native, failed: native.end(),
)
