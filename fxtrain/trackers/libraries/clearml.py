"""ClearML."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.errors import PlanError
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, array, library


@record
class ClearML:
    """ClearML, which allows one task per process.

    Attributes:
        project: Name of the project; by default the library's own.
        online: Send metrics; otherwise they are kept in a zip file for
            `Task.import_offline_session`.
        init: Arguments of `clearml.Task.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["clearml"] = attrs.field(default="clearml", init=False)
    project: str | None = None
    online: bool = True
    init: Mapping[str, object] = arguments()


def _open(config: ClearML, start: Start) -> Any:
    task = library(ClearML, "clearml").Task
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


def _write(native: Any, entry: Entry) -> None:
    name, value, step = entry.name, entry.value, entry.step
    logger = native.get_logger()
    match entry.kind:
        case "params":
            native.set_parameters(dict(value))
        case "log":
            for metric, number in value.items():
                title, _, series = metric.rpartition("/")
                logger.report_scalar(title or metric, series, number, step)
        case "text":
            logger.report_text(f"{name} at step {step}: {value}", print_console=False)
        case "image":
            logger.report_image(name, name, iteration=step, image=array(value))
        case "table":
            plot = [value["columns"], *value["rows"]]
            logger.report_table(name, name, iteration=step, table_plot=plot)
        case _:
            native.upload_artifact(name, artifact_object=str(value), wait_on_upload=True)


def _close(native: Any, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    if failed:
        native.mark_failed()
    native.close()


CLEARML = Tracker(
    name="ClearML",
    config=ClearML,
    package="clearml",
    open=_open,
    write=_write,
    flush=lambda native: native.flush(wait_for_uploads=True),
    close=_close,
    identity=lambda native: native.id,
)
