"""Comet."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from torch import Tensor

from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.trackers.libraries.pictures import picture
from fxtrain.trackers.tracker import At, Start, Tracker, arguments, maybe_named


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
    project: str | None = maybe_named()
    workspace: str | None = maybe_named()
    online: bool = True
    folder: str | None = maybe_named()
    init: Mapping[str, object] = arguments()


_NEEDED_BY = "fx.trackers.Comet(...)"
# What Comet would log of the process by default.
_BY_ITSELF = (
    "log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch", "log_env_gpu",
    "log_env_cpu", "log_env_network", "log_env_disk", "auto_param_logging", "auto_metric_logging",
    "auto_output_logging",
)  # fmt: skip


def _open(config: Comet, start: Start) -> Any:
    comet = optional("comet_ml", extra="comet", needed_by=_NEEDED_BY)
    folder = start.place(config.folder, "comet")
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


def _params(native: Any, start: Start) -> None:
    native.log_parameters(dict(start.params))


def _log(native: Any, values: Mapping[str, float], at: At) -> None:
    native.log_metrics(dict(values), step=at.step, epoch=at.epoch)


def _text(native: Any, name: str, text: str, at: At) -> None:
    native.log_text(text, step=at.step, metadata={"name": name})


def _image(native: Any, name: str, image: Tensor, at: At) -> None:
    pil_image = picture(image, extra="comet", needed_by=_NEEDED_BY)
    native.log_image(pil_image, name=name, step=at.step)


def _table(
    native: Any, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], at: At
) -> None:
    file = f"{name.replace('/', '-')}-{at.step}.csv"
    native.log_table(file, [list(row) for row in rows], headers=list(columns))


def _artifact(native: Any, name: str, path: Path, at: At) -> None:
    if path.is_dir():
        native.log_asset_folder(str(path), step=at.step, log_file_name=True)
    else:
        native.log_asset(str(path), file_name=name, step=at.step)


COMET = Tracker(
    name="Comet",
    config=Comet,
    package="comet_ml",
    open=_open,
    identity=lambda native: native.get_key(),
    params=_params,
    log=_log,
    text=_text,
    image=_image,
    table=_table,
    artifact=_artifact,
    flush=lambda native: native.flush(),
    close=lambda native, failed: native.end(),
)
