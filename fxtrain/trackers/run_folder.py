"""The folder of a run: its lock, and the file that records which run it belongs to."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from fxtrain._reading import path_problem, read_text
from fxtrain._record import shown
from fxtrain.checkpoint.folder_lock import Lock, acquire
from fxtrain.checkpoint.storage import open_storage
from fxtrain.errors import FxError, PlanError
from fxtrain.state import DistContext
from fxtrain.state.parsing import parse_json

_FILE = "run.json"
_FORMAT = 1
_ID = re.compile("[0-9a-f]{32}")
_HOW = "resume=run.state() from the checkpoint, and position=restored.position"


@attrs.frozen(kw_only=True)
class Identity:
    """The identity of a run.

    Attributes:
        id: Id of the run.
        identities: For each rank that tracks, its trackers' ids of the run, by tracker.
    """

    id: str
    identities: tuple[Mapping[str, str], ...] = ()

    def of_rank(self, rank: int) -> Mapping[str, str]:
        """The ids of the trackers of one rank, if it tracks."""
        return self.identities[rank] if rank < len(self.identities) else {}


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
        return acquire(open_storage(folder), for_run=True)
    except FxError as error:
        raise PlanError(f"track({str(folder)!r}): {error}") from error
    except OSError as error:
        raise PlanError(f"track({str(folder)!r}): {_no_folder(error)}") from error


def claim(folder: Path, resume: Mapping[str, Any] | Literal["folder"] | None) -> Identity:
    """Decide which run this is.

    Raises:
        PlanError: the folder belongs to another run, or cannot be read.
    """
    requested = None if resume is None or resume == "folder" else _identity(resume, "resume")
    try:
        known = read_identity(folder)
    except OSError as error:
        raise PlanError(f"track({str(folder)!r}): {_no_folder(error)}") from error
    if known is None:
        return requested or Identity(id=secrets.token_hex(16))
    if resume is None:
        raise PlanError(
            f"track({str(folder)!r}): a new run was requested, but this folder belongs to the run "
            f"{known.id}. Choose another folder; or continue that run with {_HOW}; or restart it "
            f"with resume='folder' and position=fx.Position()."
        )
    if requested is None:
        return known
    if requested.id != known.id:
        raise PlanError(
            f"track({str(folder)!r}): resume is the run {requested.id}, but this folder belongs to "
            f"the run {known.id}. Choose the folder of that run, or an empty one."
        )
    # For trackers that the checkpoint does not have, the ids of the folder.
    ranks = range(max(len(known.identities), len(requested.identities)))
    ids = ({**known.of_rank(rank), **requested.of_rank(rank)} for rank in ranks)
    return Identity(id=known.id, identities=tuple(ids))


def read_identity(folder: Path) -> Identity | None:
    """The run of a folder, if any.

    Raises:
        PlanError: its file was not written by this library, or by a newer version.
        OSError: it cannot be read.
    """
    path = folder / _FILE
    try:
        data = parse_json(read_text(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PlanError(f"{path} is not a valid run file: {str(error)[:200]}") from None
    return _identity(data, str(path))


def write_identity(folder: Path, identity: Identity) -> None:
    """Record which run a folder belongs to.

    Effects:
        Writes a file atomically.

    Raises:
        OSError: it cannot be written.
    """
    data = {"format": _FORMAT, "id": identity.id, "identities": list(identity.identities)}
    replace_file(folder / _FILE, [json.dumps(data, indent=2).encode(), b"\n"])


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
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _identity(data: Any, where: str) -> Identity:
    match data:
        case {"id": str(id), "identities": [*rows]} if (
            data.get("format", _FORMAT) == _FORMAT
            and _ID.fullmatch(id)
            and all(isinstance(row, Mapping) for row in rows)
        ):
            return Identity(id=id, identities=tuple(map(dict, rows)))
        case _:
            raise PlanError(
                f"track: {where} is {shown(data)}, which is not a run of this version (format "
                f"{_FORMAT}). Pass the value of run.state(), or choose another folder."
            )


def _no_folder(error: OSError) -> str:
    reason = "a file has this name" if isinstance(error, FileExistsError) else error
    return f"the folder of the run cannot be used: {reason}. Choose another folder."
