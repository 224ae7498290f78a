"""Comet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._record import record
from fxtrain.trackers.tracker import Entry, Start, Tracker, arguments, library, picture


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


def _open(config: Comet, start: Start) -> Any:
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


def _write(native: Any, entry: Entry) -> None:
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
    open=_open,
    write=_write,
    flush=lambda native: native.flush(),
    close=lambda native, failed: native.end(),
    identity=lambda native: native.get_key(),
)
