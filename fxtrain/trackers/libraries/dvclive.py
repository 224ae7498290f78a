"""DVCLive."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, library, picture


@record
class DVCLive:
    """DVCLive: files that DVC shows. Nothing is committed, and `dvc.yaml` is not written.

    DVCLive itself runs `dvc init` in a git repository that DVC does not know yet.

    Attributes:
        init: Arguments of `dvclive.Live`, beside fxtrain's or in place of them. By default, the
            folder (`dir`) is `dvclive` in the run's.
    """

    kind: Literal["dvclive"] = attrs.field(default="dvclive", init=False)
    init: Mapping[str, object] = arguments()


def _open(config: DVCLive, start: Start) -> Any:
    live = library(DVCLive, "dvclive").Live
    # By default it would write a git commit, a dvc.yaml and a report.
    own = {"report": None, "save_dvc_exp": False, "dvcyaml": None, "resume": start.resumed}
    init = {"dir": str(start.folder / "dvclive"), **own, **config.init}
    if start.resumed:
        for path in sorted((Path(init["dir"]) / "plots" / "metrics").rglob("*.tsv")):
            _cut(path, start.position.updates)
    return live(**init)


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


def _write(native: Any, entry: Entry) -> None:
    match entry.kind:
        case "params":
            plain = {name: str(x) if x is None else x for name, x in entry.value.items()}
            native.log_params(plain)
        case "log":
            native.step = entry.step
            for name, number in entry.value.items():
                native.log_metric(name, number)
            native.make_summary()
        case _:
            native.log_image(f"{entry.name}-{entry.step}.png", picture(DVCLive, entry.value))


DVCLIVE = Tracker(
    name="DVCLive",
    config=DVCLive,
    package="dvclive",
    kinds=("params", "log", "image"),
    open=_open,
    write=_write,
    close=lambda native, failed: native.end(),
    refuses=_refuses,
)
