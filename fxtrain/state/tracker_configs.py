"""Configs of trackers: where metrics go. Data only."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fxtrain._record import above, at_least, record

__all__ = [
    "Aim",
    "ClearML",
    "Comet",
    "DVCLive",
    "JsonLines",
    "MLflow",
    "SwanLab",
    "TensorBoard",
    "Terminal",
    "Trackio",
    "WandB",
]


def _is_name(_: Any, __: Any, value: str) -> None:
    if not value.strip() or not value.isprintable():
        raise ValueError("choose a name of printable characters.")


def _maybe_named() -> Any:
    return attrs.field(default=None, validator=_is_name)


def _init() -> Any:
    words = "a table of arguments by name"
    # Not shown, since it may have a key; a mapping has no hash.
    return attrs.field(factory=dict, repr=False, hash=False, metadata={"choose": words})


@record
class JsonLines:
    """A file of JSON lines in the run's folder; needs no package.

    Attributes:
        file: Its name. On ranks other than 0, the number of the rank is inserted before the suffix.
    """

    kind: Literal["json_lines"] = attrs.field(default="json_lines", init=False)
    file: str = attrs.field(default="metrics.jsonl", validator=_is_name)


@record
class Terminal:
    """Lines on standard output at intervals.

    Attributes:
        every_s: Minimum seconds between two lines of metrics; metrics in between are not shown.
        digits: Significant digits of a number.
    """

    kind: Literal["terminal"] = attrs.field(default="terminal", init=False)
    every_s: float = attrs.field(default=1.0, validator=at_least(0))
    digits: int = attrs.field(default=4, validator=at_least(1))


@record
class TensorBoard:
    """Event files, written by the package `tensorboard`.

    Attributes:
        folder: Its folder; by default `tensorboard` in the run's folder.
        flush_s: Maximum seconds until a metric is in the file.
        init: Arguments of torch's `SummaryWriter`, beside fxtrain's or in place of them.
    """

    kind: Literal["tensorboard"] = attrs.field(default="tensorboard", init=False)
    folder: str | None = _maybe_named()
    flush_s: float = attrs.field(default=10.0, validator=above(0))
    init: Mapping[str, object] = _init()


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
    project: str | None = _maybe_named()
    entity: str | None = _maybe_named()
    group: str | None = _maybe_named()
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] = "online"
    init: Mapping[str, object] = _init()


@record
class Trackio:
    """Trackio, which writes to the folder that its variable TRACKIO_DIR names.

    Attributes:
        project: Name of the project; by default the name of the folder that contains the run's.
        space: Hugging Face Space that shows it; None stays on this machine.
        init: Arguments of `trackio.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["trackio"] = attrs.field(default="trackio", init=False)
    project: str | None = _maybe_named()
    space: str | None = _maybe_named()
    init: Mapping[str, object] = _init()


@record
class Comet:
    """Comet.

    Attributes:
        project: Name of the project; by default the library's own.
        workspace: None for the account's own.
        online: Send metrics; otherwise they are kept in a zip file for `comet upload`.
        folder: Folder of that file; by default `comet` in the run's folder.
        init: Arguments of `comet_ml.ExperimentConfig`, beside fxtrain's or in place of them.
    """

    kind: Literal["comet"] = attrs.field(default="comet", init=False)
    project: str | None = _maybe_named()
    workspace: str | None = _maybe_named()
    online: bool = True
    folder: str | None = _maybe_named()
    init: Mapping[str, object] = _init()


@record
class Aim:
    """Aim.

    Attributes:
        experiment: Name of the experiment; by default the library's own.
        repo: Folder or address of the repository; by default `aim` in the run's folder.
        init: Arguments of `aim.Run`, beside fxtrain's or in place of them.
    """

    kind: Literal["aim"] = attrs.field(default="aim", init=False)
    experiment: str | None = _maybe_named()
    repo: str | None = _maybe_named()
    init: Mapping[str, object] = _init()


@record
class MLflow:
    """MLflow, through its client, so that other active runs are not affected.

    Attributes:
        experiment: Name of the experiment; by default "Default", as in MLflow.
        uri: Tracking server; by default a SQLite file `mlflow.db` in the run's folder.
        artifacts: Where a new experiment stores files; by default `mlflow` in the run's folder
            for the SQLite file, otherwise as the server chooses.
        init: Arguments of `MlflowClient.create_run`, beside fxtrain's or in place of them.
    """

    kind: Literal["mlflow"] = attrs.field(default="mlflow", init=False)
    experiment: str | None = _maybe_named()
    uri: str | None = _maybe_named()
    artifacts: str | None = _maybe_named()
    init: Mapping[str, object] = _init()


@record
class ClearML:
    """ClearML, which allows one task per process.

    Attributes:
        project: Name of the project; by default the library's own.
        tags: Words by which to find the task.
        online: Send metrics; otherwise they are kept in a zip file for
            `Task.import_offline_session`.
        init: Arguments of `clearml.Task.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["clearml"] = attrs.field(default="clearml", init=False)
    project: str | None = _maybe_named()
    tags: tuple[str, ...] = ()
    online: bool = True
    init: Mapping[str, object] = _init()


@record
class DVCLive:
    """DVCLive: files that DVC shows. Nothing is committed, and `dvc.yaml` is not written.

    DVCLive itself runs `dvc init` in a git repository that DVC does not know yet.

    Attributes:
        folder: Their folder; by default `dvclive` in the run's folder.
        init: Arguments of `dvclive.Live`, beside fxtrain's or in place of them.
    """

    kind: Literal["dvclive"] = attrs.field(default="dvclive", init=False)
    folder: str | None = _maybe_named()
    init: Mapping[str, object] = _init()


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
    project: str | None = _maybe_named()
    workspace: str | None = _maybe_named()
    mode: Literal["cloud", "local", "offline", "disabled"] = "cloud"
    folder: str | None = _maybe_named()
    init: Mapping[str, object] = _init()
