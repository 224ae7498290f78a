"""MLflow, through its client."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote

import attrs
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.trackers.libraries.pictures import array
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


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
    experiment: str | None = maybe_named()
    uri: str | None = maybe_named()
    artifacts: str | None = maybe_named()
    init: Mapping[str, object] = arguments()


_ACCEPTED = re.compile(r"[\w\-. :/]{1,250}")
_AT_ONCE = 100  # hyperparameters that a server accepts in one call


@attrs.frozen(kw_only=True, eq=False)
class Client:
    """MLflow's client and its run.

    Attributes:
        client: An `mlflow.MlflowClient`.
        run: MLflow's id of the run.
    """

    client: Any
    run: str


def _library() -> Any:
    return optional("mlflow", extra="mlflow", needed_by="fx.MLflow(...)")


def _open(config: MLflow, start: Start) -> Client:
    folder = start.folder.resolve()
    local = config.uri is None
    uri = f"sqlite:///{folder / 'mlflow.db'}" if config.uri is None else config.uri
    artifacts = (folder / "mlflow").as_uri() if local else None
    client = _library().MlflowClient(tracking_uri=uri)
    if start.resumed:
        client.update_run(start.identity, status="RUNNING")
        return Client(client=client, run=start.identity)
    name = config.experiment or "Default"
    known = client.get_experiment_by_name(name)
    experiment = (
        client.create_experiment(name, config.artifacts or artifacts)
        if known is None
        else known.experiment_id
    )
    init = {"run_name": start.name, **config.init}
    tags = {"fxtrain.run": start.run, **init.pop("tags", {})}
    run = client.create_run(experiment, **init, tags=tags)
    return Client(client=client, run=run.info.run_id)


def _refuses(name: str) -> str:
    if _ACCEPTED.fullmatch(name):
        return ""
    return "MLflow accepts letters, digits, _ - . : / and spaces, at most 250"


def _last_steps(native: Client, start: Start) -> dict[str, int]:
    # The last value of each metric; `data.metrics` has them without their steps.
    metrics = native.client.get_run(native.run).data.to_proto().metrics
    return {metric.key: metric.step for metric in metrics}


def _params(native: Client, start: Start) -> None:
    # Existing hyperparameters of a resumed run cannot be changed.
    known = native.client.get_run(native.run).data.params
    param = _library().entities.Param
    new = [
        param(name, str(value))
        for name, value in start.params.items()
        if name not in known and not _refuses(name)
    ]
    for first in range(0, len(new), _AT_ONCE):
        native.client.log_batch(native.run, params=new[first : first + _AT_ONCE])


def _log(native: Client, values: Mapping[str, float], at: At) -> None:
    metric = _library().entities.Metric
    when = int(at.time * 1000)
    metrics = [metric(name, value, when, at.step) for name, value in values.items()]
    native.client.log_batch(native.run, metrics=metrics)


def _text(native: Client, name: str, text: str, at: At) -> None:
    native.client.log_text(native.run, text, f"{_file(name)}-{at.step}.txt")


def _image(native: Client, name: str, image: Tensor, at: At) -> None:
    native.client.log_image(native.run, array(image), f"{_file(name)}-{at.step}.png")


def _table(
    native: Client, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], at: At
) -> None:
    file = f"{_file(name)}-{at.step}.json"
    folder = str(PurePosixPath(file).parent)
    known = native.client.list_artifacts(native.run, None if folder == "." else folder)
    if file not in [artifact.path for artifact in known]:  # MLflow would append the rows again
        data = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
        native.client.log_table(native.run, data, file)


def _artifact(native: Client, name: str, path: Path, at: At) -> None:
    native.client.log_artifact(native.run, str(path), _file(name))


def _file(name: str) -> str:
    return quote(name, safe="/ ").strip("/")


def _close(native: Client, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    native.client.set_terminated(native.run, status="FAILED" if failed else "FINISHED")


MLFLOW = Tracker(
    name="MLflow",
    config=MLflow,
    package="mlflow",
    open=_open,
    identity=lambda native: native.run,
    refuses=_refuses,
    last_steps=_last_steps,
    params=_params,
    log=_log,
    text=_text,
    image=_image,
    table=_table,
    artifact=_artifact,
    close=_close,
)
