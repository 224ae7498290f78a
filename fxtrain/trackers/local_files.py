"""Trackers of libraries that write files and databases, by default in the folder of a run."""

import re
import time
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, array, library, picture


@record
class TensorBoard:
    """Event files, written by the package `tensorboard`.

    Attributes:
        init: Arguments of torch's `SummaryWriter`, beside fxtrain's or in place of them.
    """

    kind: Literal["tensorboard"] = attrs.field(default="tensorboard", init=False)
    init: Mapping[str, object] = arguments()


def _open_tensorboard(config: TensorBoard, start: Start) -> Any:
    library(TensorBoard, "tensorboard")
    # TensorBoard hides the events of earlier files from that step on.
    purge = start.position.updates + 1 if start.resumed else None
    own = {"log_dir": str(start.folder / "tensorboard"), "flush_secs": 10, "purge_step": purge}
    init = {**own, **config.init}
    _await_later_name(Path(init["log_dir"]))
    return library(TensorBoard, "torch.utils.tensorboard").SummaryWriter(**init)


def _await_later_name(folder: Path) -> None:
    """Wait until a new event file sorts behind all others: at most a second.

    TensorBoard reads files in the order of their names, which begin with a time in whole seconds,
    and then have a process id.
    """
    now = int(time.time())
    while any(folder.glob(f"events.out.tfevents.{now:010}.*")):
        time.sleep(0.02)
        now = int(time.time())


def _write_tensorboard(native: Any, entry: Entry) -> None:
    name, value, at = entry.name, entry.value, {"global_step": entry.step, "walltime": entry.time}
    match entry.kind:
        case "params":
            summary = library(TensorBoard, "torch.utils.tensorboard.summary")
            plain = {name: str(x) if x is None else x for name, x in value.items()}
            # As `add_hparams` does, which would write them into a separate run.
            for part in summary.hparams(plain, {}):
                native.file_writer.add_summary(part)
        case "log":
            # One event for all values: `add_scalar` makes one each, and takes five times as long.
            proto = library(TensorBoard, "tensorboard.compat.proto.summary_pb2").Summary
            scalars = [proto.Value(tag=name, simple_value=number) for name, number in value.items()]
            native.file_writer.add_summary(proto(value=scalars), entry.step, entry.time)
        case "text":
            native.add_text(name, value, **at)
        case "image":
            native.add_image(name, value.numpy(), **at, dataformats="HWC")
        case _:
            lines = [value["columns"], ["---"] * len(value["columns"]), *value["rows"]]
            text = "\n".join("|".join(["", *(_cell(cell) for cell in line), ""]) for line in lines)
            native.add_text(name, text, **at)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


TENSORBOARD = Tracker(
    name="TensorBoard",
    config=TensorBoard,
    package="tensorboard",
    kinds=("params", "log", "text", "image", "table"),
    open=_open_tensorboard,
    write=_write_tensorboard,
    flush=lambda native: native.flush(),
    close=lambda native, failed: native.close(),
)


@record
class MLflow:
    """MLflow, through its client, so that other active runs are not affected.

    Attributes:
        experiment: Name of the experiment; by default "Default", as in MLflow.
        uri: Tracking server; by default a SQLite file `mlflow.db` in the run's folder.
        init: Arguments of `MlflowClient.create_run`, beside fxtrain's or in place of them.
    """

    kind: Literal["mlflow"] = attrs.field(default="mlflow", init=False)
    experiment: str | None = None
    uri: str | None = None
    init: Mapping[str, object] = arguments()


_ACCEPTED = re.compile(r"[\w\-. :/]{1,250}")
_AT_ONCE = 100  # hyperparameters that a server accepts in one call


_Client = tuple[Any, str]  # an `mlflow.MlflowClient`, and MLflow's id of the run


def _open_mlflow(config: MLflow, start: Start) -> _Client:
    folder = start.folder.resolve()
    uri = config.uri or f"sqlite:///{folder / 'mlflow.db'}"
    artifacts = None if config.uri else (folder / "mlflow").as_uri()
    client = library(MLflow, "mlflow").MlflowClient(tracking_uri=uri)
    if start.resumed:
        client.update_run(start.identity, status="RUNNING")
        return client, start.identity
    name = config.experiment or "Default"
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name, artifacts)
    own = {"run_name": start.name, "tags": {"fxtrain.run": start.group or start.id}}
    run = client.create_run(experiment, **{**own, **config.init})
    return client, run.info.run_id


def _refuses_mlflow(name: str) -> str:
    if _ACCEPTED.fullmatch(name):
        return ""
    return "MLflow accepts letters, digits, _ - . : / and spaces, at most 250"


def _last_steps_mlflow(native: _Client, start: Start) -> dict[str, int]:
    # The last value of each metric; `data.metrics` has them without their steps.
    client, run = native
    metrics = client.get_run(run).data.to_proto().metrics
    return {metric.key: metric.step for metric in metrics}


def _write_mlflow(native: _Client, entry: Entry) -> None:
    client, run = native
    value, step = entry.value, entry.step
    file = quote(entry.name, safe="/ ").strip("/")
    match entry.kind:
        case "params":
            _write_params(native, value)
        case "log":
            metric = library(MLflow, "mlflow").entities.Metric
            when = int(entry.time * 1000)
            metrics = [metric(name, number, when, step) for name, number in value.items()]
            client.log_batch(run, metrics=metrics)
        case "text":
            client.log_text(run, value, f"{file}-{step}.txt")
        case "image":
            client.log_image(run, array(value), f"{file}-{step}.png")
        case "table":
            _write_table(native, value, f"{file}-{step}.json")
        case _:
            client.log_artifact(run, str(value), file)


def _write_params(native: _Client, params: Mapping[str, Any]) -> None:
    # Existing hyperparameters of a resumed run cannot be changed.
    client, run = native
    known = client.get_run(run).data.params
    param = library(MLflow, "mlflow").entities.Param
    new = [
        param(name, str(value))
        for name, value in params.items()
        if name not in known and not _refuses_mlflow(name)
    ]
    for first in range(0, len(new), _AT_ONCE):
        client.log_batch(run, params=new[first : first + _AT_ONCE])


def _write_table(native: _Client, table: Mapping[str, Any], file: str) -> None:
    client, run = native
    folder = str(PurePosixPath(file).parent)
    known = client.list_artifacts(run, None if folder == "." else folder)
    if file not in [artifact.path for artifact in known]:  # MLflow would append the rows again
        names, rows = table["columns"], table["rows"]
        data = {name: [row[place] for row in rows] for place, name in enumerate(names)}
        client.log_table(run, data, file)


def _close_mlflow(native: _Client, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    client, run = native
    client.set_terminated(run, status="FAILED" if failed else "FINISHED")


MLFLOW = Tracker(
    name="MLflow",
    config=MLflow,
    package="mlflow",
    open=_open_mlflow,
    write=_write_mlflow,
    close=_close_mlflow,
    identity=lambda native: native[1],
    refuses=_refuses_mlflow,
    last_steps=_last_steps_mlflow,
)


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


def _open_dvclive(config: DVCLive, start: Start) -> Any:
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


def _refuses_dvclive(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return "it is the path of a file inside the folder"
    return ""


def _write_dvclive(native: Any, entry: Entry) -> None:
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
    open=_open_dvclive,
    write=_write_dvclive,
    close=lambda native, failed: native.end(),
    refuses=_refuses_dvclive,
)


@record
class Aim:
    """Aim.

    Attributes:
        experiment: Name of the experiment; by default the library's own.
        init: Arguments of `aim.Run`, beside fxtrain's or in place of them. By default, the
            repository (`repo`) is `aim` in the run's folder.
    """

    kind: Literal["aim"] = attrs.field(default="aim", init=False)
    experiment: str | None = None
    init: Mapping[str, object] = arguments()


def _open_aim(config: Aim, start: Start) -> Any:
    own = {
        "repo": str(start.folder / "aim"),
        "experiment": config.experiment,
        "system_tracking_interval": None,
        "capture_terminal_logs": False,
        "log_system_params": False,
    }
    run = library(Aim, "aim").Run(start.identity or None, **{**own, **config.init})
    run.name = start.name
    return run


def _write_aim(native: Any, entry: Entry) -> None:
    if entry.kind == "params":
        native["hparams"] = dict(entry.value)
        return
    values = entry.value if entry.kind == "log" else {entry.name: entry.value}
    for name, value in values.items():
        if entry.kind == "text":
            value = library(Aim, "aim").Text(value)
        elif entry.kind == "image":
            value = library(Aim, "aim").Image(picture(Aim, value))
        native.track(value, name=name, step=entry.step, epoch=entry.epoch)


AIM = Tracker(
    name="Aim",
    config=Aim,
    package="aim",
    kinds=("params", "log", "text", "image"),
    open=_open_aim,
    write=_write_aim,
    close=lambda native, failed: native.close(),
    identity=lambda native: native.hash,
)
