"""MLflow, through its client."""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import quote

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, array, library


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


def _open(config: MLflow, start: Start) -> _Client:
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


def _refuses(name: str) -> str:
    if _ACCEPTED.fullmatch(name):
        return ""
    return "MLflow accepts letters, digits, _ - . : / and spaces, at most 250"


def _last_steps(native: _Client, start: Start) -> dict[str, int]:
    # The last value of each metric; `data.metrics` has them without their steps.
    client, run = native
    metrics = client.get_run(run).data.to_proto().metrics
    return {metric.key: metric.step for metric in metrics}


def _write(native: _Client, entry: Entry) -> None:
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
        if name not in known and not _refuses(name)
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


def _close(native: _Client, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    client, run = native
    client.set_terminated(run, status="FAILED" if failed else "FINISHED")


MLFLOW = Tracker(
    name="MLflow",
    config=MLflow,
    package="mlflow",
    open=_open,
    write=_write,
    close=_close,
    identity=lambda native: native[1],
    refuses=_refuses,
    last_steps=_last_steps,
)
