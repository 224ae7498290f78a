"""ClearML."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.errors import PlanError
from fxtrain.trackers.libraries.pictures import array
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


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
    project: str | None = maybe_named()
    tags: tuple[str, ...] = ()
    online: bool = True
    init: Mapping[str, object] = arguments()


def _open(config: ClearML, start: Start) -> Any:
    task = optional("clearml", extra="clearml", needed_by="fx.trackers.ClearML(...)").Task
    if (other := task.current_task()) is not None:
        raise PlanError(
            f"fx.trackers.ClearML(project={config.project!r}): ClearML allows one task per "
            f"process, but the task {other.name!r} is open. Close it first."
        )
    if not config.online:
        task.set_offline(True)
    continued = start.resumed and config.online
    own = {
        "project_name": config.project,
        "task_name": start.name,
        "tags": list(config.tags) or None,
        "reuse_last_task_id": False,
        "continue_last_task": start.identity if continued else False,
        "auto_connect_arg_parser": False,
        "auto_connect_frameworks": False,
        "auto_resource_monitoring": False,
        "auto_connect_streams": False,
    }
    opened = task.init(**{**own, **config.init})
    if continued:  # ClearML would add the last iteration of the task to every step
        opened.set_initial_iteration(0)
    return opened


def _params(native: Any, start: Start) -> None:
    native.set_parameters(dict(start.params))


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    logger = native.get_logger()
    for name, value in values.items():
        title, _, series = name.rpartition("/")
        logger.report_scalar(title or name, series, value, at.step)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.get_logger().report_text(f"{name} at step {at.step}: {text}", print_console=False)


def _image(native: Any, name: str, image: Tensor, at: At) -> None:
    native.get_logger().report_image(name, name, iteration=at.step, image=array(image))


def _table(
    native: Any, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], at: At
) -> None:
    plot = [list(columns), *(list(row) for row in rows)]
    native.get_logger().report_table(name, name, iteration=at.step, table_plot=plot)


def _artifact(native: Any, name: str, path: Path, at: At) -> None:
    native.upload_artifact(name, artifact_object=str(path), wait_on_upload=True)


def _close(native: Any, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    if failed:
        native.mark_failed()
    native.close()


CLEARML = Tracker(
    name="ClearML",
    config=ClearML,
    package="clearml",
    open=_open,
    identity=lambda native: native.id,
    params=_params,
    log=_log,
    text=_text,
    image=_image,
    table=_table,
    artifact=_artifact,
    flush=lambda native: native.flush(wait_for_uploads=True),
    close=_close,
)
