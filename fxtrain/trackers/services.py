"""Trackers of libraries that send runs to a service, or keep them for it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.errors import PlanError
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, array, library, picture


@record
class WandB:
    """Weights & Biases.

    Attributes:
        project: Name of the project; by default the library's own.
        mode: Whether metrics are sent, kept for `wandb sync`, or dropped.
        init: Arguments of `wandb.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["wandb"] = attrs.field(default="wandb", init=False)
    project: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"
    init: Mapping[str, object] = arguments()


def _open_wandb(config: WandB, start: Start) -> Any:
    own = {
        "project": config.project,
        "name": start.name,
        "group": start.group,
        "id": start.id,
        "dir": str(start.folder),
        "mode": config.mode,
        # A server appends to the run with this id; a file cannot know its earlier content.
        "resume": "allow" if config.mode == "online" else None,
        # Independent of other runs in this process.
        "reinit": "create_new",
        "settings": {"silent": True, "console": "off"},
    }
    return library(WandB, "wandb").init(**{**own, **config.init})


def _write_wandb(native: Any, entry: Entry) -> None:
    wandb = library(WandB, "wandb")
    name, value, step = entry.name, entry.value, entry.step
    match entry.kind:
        case "params":
            native.config.update(dict(value), allow_val_change=True)
        case "log":
            # Axes to plot over, under names that users are unlikely to log.
            axes = {"position/rows": entry.rows, "position/epoch": entry.epoch}
            known = {axis: place for axis, place in axes.items() if place is not None}
            native.log({**known, **value}, step=step)
        case "text":
            native.log({name: wandb.Table(columns=["text"], data=[[value]])}, step=step)
        case "image":
            native.log({name: wandb.Image(array(value))}, step=step)
        case "table":
            table = wandb.Table(columns=value["columns"], data=value["rows"])
            native.log({name: table}, step=step)
        case _:
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name), type="file")
            (artifact.add_dir if value.is_dir() else artifact.add_file)(str(value))
            native.log_artifact(artifact)


WANDB = Tracker(
    name="WandB",
    config=WandB,
    package="wandb",
    open=_open_wandb,
    write=_write_wandb,
    close=lambda native, failed: native.finish(exit_code=int(failed)),
    identity=lambda native: native.id,
)


@record
class Trackio:
    """Trackio, which writes to the folder that its variable TRACKIO_DIR names.

    Attributes:
        project: Name of the project; by default the name of the folder that contains the run's.
        space: Hugging Face Space that shows it; None stays on this machine.
        init: Arguments of `trackio.init`, beside fxtrain's or in place of them.
    """

    kind: Literal["trackio"] = attrs.field(default="trackio", init=False)
    project: str | None = None
    space: str | None = None
    init: Mapping[str, object] = arguments()


def _open_trackio(config: Trackio, start: Start) -> Any:
    # Trackio identifies a run by its name alone, so the id is a part of it.
    parent = start.folder.resolve().parents[1 if start.rank else 0]
    own = {
        "project": config.project or parent.name or "fxtrain",
        "name": start.identity or f"{start.name}-{start.id[:8]}",
        "group": start.group,
        "space_id": config.space,
        "config": {name: value for name, value in start.params.items() if not name.startswith("_")},
        "resume": "allow",
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }
    return library(Trackio, "trackio").init(**{**own, **config.init})


def _last_steps_trackio(native: Any, start: Start) -> dict[str, int]:
    """From the database on this machine; a Space has its own, which cannot be asked."""
    storage = library(Trackio, "trackio.sqlite_storage")
    run = {"project": native.project, "run": native.name, "run_id": native.id}
    last = storage.SQLiteStorage.get_last_step(**run)
    more = 0 if last is None else last - start.position.updates
    if more <= 0:
        return {}
    entries_of = storage.SQLiteStorage.get_snapshot(**run, around_step=last, window=more - 1)
    return {name: max(entry["step"] for entry in entries) for name, entries in entries_of.items()}


def _write_trackio(native: Any, entry: Entry) -> None:
    trackio = library(Trackio, "trackio")
    name, value, step = entry.name, entry.value, entry.step
    match entry.kind:
        case "log":
            native.log(dict(value), step=step)
        case "text":
            native.log({name: trackio.Markdown(value)}, step=step)
        case "image":
            native.log({name: trackio.Image(array(value))}, step=step)
        case "table":
            table = trackio.Table(columns=value["columns"], data=value["rows"])
            native.log({name: table}, step=step)
        case _:
            native.log_artifact(str(value), name=name)


def _flush(native: Any) -> None:
    # Its thread writes every half a second, and has no public way to be asked earlier.
    if native._is_local:
        with native._client_lock:
            native._flush_queues_inline()


TRACKIO = Tracker(
    name="Trackio",
    config=Trackio,
    package="trackio",
    kinds=("log", "text", "image", "table", "artifact"),
    open=_open_trackio,
    write=_write_trackio,
    flush=_flush,
    close=lambda native, failed: native.finish(),
    identity=lambda native: native.name,
    last_steps=_last_steps_trackio,
)


@record
class Comet:
    """Comet.

    Attributes:
        project: Name of the project; by default the library's own.
        workspace: None for the account's own.
        online: Send metrics; otherwise they are kept in a zip file for `comet upload`, by default
            in `comet` in the run's folder.
        init: Arguments of `comet_ml.ExperimentConfig`, beside fxtrain's or in place of them.
    """

    kind: Literal["comet"] = attrs.field(default="comet", init=False)
    project: str | None = None
    workspace: str | None = None
    online: bool = True
    init: Mapping[str, object] = arguments()


# What Comet would log of the process by default.
_BY_ITSELF = (
    "log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_gpu",
    "log_env_cpu", "log_env_network", "log_env_disk", "auto_param_logging", "auto_metric_logging",
    "auto_output_logging",
)  # fmt: skip


def _open_comet(config: Comet, start: Start) -> Any:
    comet = library(Comet, "comet_ml")
    folder = start.folder / "comet"
    if not config.online:
        folder = _free(folder, f"{start.id}.zip")
    own = {
        "name": start.name,
        "offline_directory": str(folder),
        "display_summary_level": 0,
        **dict.fromkeys(_BY_ITSELF, False),
    }
    return comet.start(
        project_name=config.project,
        workspace=config.workspace,
        online=config.online,
        experiment_key=start.id,
        mode="get" if start.resumed and config.online else "create",
        experiment_config=comet.ExperimentConfig(**{**own, **config.init}),
    )


def _free(folder: Path, file: str) -> Path:
    """A folder without an archive of this run, which Comet would overwrite."""
    free, part = folder, 1
    while (free / file).exists():
        part += 1
        free = folder / f"part{part}"
    free.mkdir(parents=True, exist_ok=True)
    return free


def _write_comet(native: Any, entry: Entry) -> None:
    name, value, step = entry.name, entry.value, entry.step
    match entry.kind:
        case "params":
            native.log_parameters(dict(value))
        case "log":
            native.log_metrics(dict(value), step=step, epoch=entry.epoch)
        case "text":
            native.log_text(value, step=step, metadata={"name": name})
        case "image":
            native.log_image(picture(Comet, value), name=name, step=step)
        case "table":
            file = f"{name.replace('/', '-')}-{step}.csv"
            native.log_table(file, value["rows"], headers=value["columns"])
        case _ if value.is_dir():
            native.log_asset_folder(str(value), step=step, log_file_name=True)
        case _:
            native.log_asset(str(value), file_name=name, step=step)


COMET = Tracker(
    name="Comet",
    config=Comet,
    package="comet_ml",
    open=_open_comet,
    write=_write_comet,
    flush=lambda native: native.flush(),
    close=lambda native, failed: native.end(),
    identity=lambda native: native.get_key(),
)


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


def _open_clearml(config: ClearML, start: Start) -> Any:
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


def _write_clearml(native: Any, entry: Entry) -> None:
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


def _close_clearml(native: Any, failed: bool) -> None:  # noqa: FBT001 - the contract of a tracker
    if failed:
        native.mark_failed()
    native.close()


CLEARML = Tracker(
    name="ClearML",
    config=ClearML,
    package="clearml",
    open=_open_clearml,
    write=_write_clearml,
    flush=lambda native: native.flush(wait_for_uploads=True),
    close=_close_clearml,
    identity=lambda native: native.id,
)


@record
class SwanLab:
    """SwanLab, which allows one run per process.

    Attributes:
        project: Name of the project; by default the library's own.
        mode: cloud sends metrics, local shows them on this machine, offline keeps them for
            `swanlab sync`, disabled drops them.
        init: Arguments of `swanlab.init`, beside fxtrain's or in place of them. By default, the
            folder (`log_dir`) is `swanlab` in the run's.
    """

    kind: Literal["swanlab"] = attrs.field(default="swanlab", init=False)
    project: str | None = None
    mode: Literal["cloud", "local", "offline", "disabled"] = "cloud"
    init: Mapping[str, object] = arguments()


def _open_swanlab(config: SwanLab, start: Start) -> Any:
    folder = start.folder / "swanlab"
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        "project": config.project,
        "name": start.name,
        "group": start.group,
        "id": start.id,
        "resume": "allow" if config.mode == "cloud" else None,
        "mode": "online" if config.mode == "cloud" else config.mode,
        "log_dir": str(folder),
        "config": dict(start.params),
    }
    return library(SwanLab, "swanlab").init(**{**own, **config.init})


def _write_swanlab(native: Any, entry: Entry) -> None:
    swanlab = library(SwanLab, "swanlab")
    match entry.kind:
        case "log":
            native.log(dict(entry.value), step=entry.step)
        case "text":
            native.log({entry.name: swanlab.Text(entry.value)}, step=entry.step)
        case _:
            native.log({entry.name: swanlab.Image(array(entry.value))}, step=entry.step)


SWANLAB = Tracker(
    name="SwanLab",
    config=SwanLab,
    package="swanlab",
    kinds=("log", "text", "image"),
    open=_open_swanlab,
    write=_write_swanlab,
    close=lambda native, failed: native.finish(state="crashed" if failed else "success"),
    closed_by_caller=True,
)
