"""The folder of a run: its lock, and the file that records which run it belongs to."""

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._reading import path_problem
from fxtrain._record import record
from fxtrain.checkpoint.folder_lock import Lock, acquire
from fxtrain.checkpoint.storage import open_storage
from fxtrain.errors import FxError, PlanError
from fxtrain.state import DistContext, read_record, structure

FILE = "run.json"
_ID = re.compile("[0-9a-f]{32}")
_HOW = "resume=run.state() from the checkpoint, and position=restored.position"


def _is_id(_: Any, __: Any, value: str) -> None:
    if not _ID.fullmatch(value):
        raise ValueError("pass the value of run.state().")


@record
class Identity:
    """The identity of a run, and for each rank that tracks, its trackers' own ids of it by kind."""

    id: str = attrs.field(validator=_is_id)
    identities: tuple[Mapping[str, str], ...] = ()
    format: Literal[1] = 1


def folder_of(path: Any) -> Path:
    """The folder of a run on this machine.

    Raises:
        PlanError: it is not a path.
    """
    if problem := path_problem(path):
        raise PlanError(f"track: {problem}.")
    text = os.fspath(path)
    if "://" in text:
        raise PlanError(
            f"track({text!r}): trackers write local files first. Choose a folder of this machine; "
            f"checkpoints may be elsewhere."
        )
    return Path(text)


def lock_folder(folder: Path, ctx: DistContext) -> Lock | None:
    """Lock the folder of a run, on rank 0; None on other ranks and in a dry run.

    Effects:
        Creates the folder.

    Raises:
        PlanError: a run is open there, or the folder cannot be written.
    """
    if ctx.comm.simulated or not ctx.is_main:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return acquire(open_storage(folder), ".lock-run")
    except FxError as error:
        raise PlanError(f"track({str(folder)!r}): {error}") from error
    except OSError as error:
        raise PlanError(f"track: {error}. Choose another folder for the run.") from error


def claim(folder: Path, resume: Mapping[str, Any] | Literal["folder"] | None) -> Identity:
    """Decide which run this is.

    Raises:
        PlanError: the folder belongs to another run, or its file is damaged.
    """
    requested = None if resume is None or resume == "folder" else structure(resume, Identity)
    if not (folder / FILE).exists():
        return requested or Identity(id=secrets.token_hex(16))
    known = read_record(folder / FILE, Identity)
    if resume is None:
        raise PlanError(
            f"track({str(folder)!r}): a new run was requested, but this folder belongs to the run "
            f"{known.id}. Choose another folder; or continue that run with {_HOW}; or restart it "
            f"with resume='folder' and position=fx.Position()."
        )
    if requested is not None and requested.id != known.id:
        raise PlanError(
            f"track({str(folder)!r}): resume is the run {requested.id}, but this folder belongs to "
            f"the run {known.id}. Choose the folder of that run, or an empty one."
        )
    return known  # which also has the ids of trackers that were added after the checkpoint


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file of a locked folder completely or not at all.

    What a process that was killed here has left is replaced by the next one.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}-draft")
    try:
        with draft.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
