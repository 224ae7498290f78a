"""Reads dumps of torch's Flight Recorder: where the ranks of any program stood."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fxtrain._reading import read_file
from fxtrain.diagnosis.stacks import Frame, Stand
from fxtrain.errors import LaunchError
from fxtrain.models.pickles import load_records

_MAX_BYTES = 1 << 30
_RANK = re.compile(r"(\d+)(\.\w+)?$")


# A group whose collectives are numbered: torch's description of it, its members' ranks in the whole
# program, and of which two ranks if these are messages and not collectives.
_Group = tuple[str, tuple[int, ...], str]


@attrs.frozen(kw_only=True)
class _Call:
    """A collective of one rank, or a message to another one."""

    group: _Group
    number: int
    op: str
    tensors: str
    completed: bool
    created_ns: int
    stack: tuple[Frame, ...]


def read_dumps(paths: Sequence[Path]) -> list[Stand]:
    """Where the ranks of a program stood, from the dumps of torch's Flight Recorder.

    A rank waits if it has started a collective that is not completed, and no rank of its group has
    started a later one. It has the stack of that collective, or of its last one. `paths` are files,
    whose names end in the rank, as pickles, whose code never runs, or JSON; and folders of them.
    """
    calls = {rank: _read(path) for rank, path in sorted(_files(paths).items())}
    last: dict[_Group, int] = {}
    for call in (call for own in calls.values() for call in own):
        last[call.group] = max(last.get(call.group, 0), call.number)
    if not last:
        raise LaunchError("These dumps of torch's Flight Recorder contain no collective.")
    world_size = 1 + max([*calls, *(rank for group in last for rank in group[1])])
    return [_stand(rank, own, last, world_size) for rank, own in calls.items() if own]


def _files(paths: Sequence[Path]) -> dict[int, Path]:
    """The dumps, by rank."""
    inside = (file for path in paths for file in (path.iterdir() if path.is_dir() else [path]))
    named = [(_RANK.search(file.name), file) for file in inside if file.is_file()]
    files: dict[int, Path] = {}
    for rank, file in ((int(rank[1]), file) for rank, file in named if rank):
        if (other := files.setdefault(rank, file)) != file:
            raise LaunchError(
                f"{other} and {file} are both dumps of rank {rank}. Pass the dumps of one run."
            )
    if not files:
        names = ", ".join(map(str, paths))
        raise LaunchError(
            f"{names} has no records of ranks. Pass the folder of a run that hung, or that of "
            f"fxtrain launch --log-dir, or of the variable FXTRAIN_STACKS; or dumps of torch's "
            f"Flight Recorder, whose names end in a rank."
        )
    return files


def _stand(rank: int, calls: Sequence[_Call], last: Mapping[_Group, int], world_size: int) -> Stand:
    newest = {call.group: call for call in calls}
    # A call that gloo has completed is not recorded as such, so only the last ones can be open.
    reports = any(call.completed for call in calls)
    open_calls = [call for call in (calls if reports else newest.values()) if not call.completed]
    waits = bool(open_calls) and all(call.number == last[call.group] for call in newest.values())
    call = open_calls[0 if reports else -1] if waits else calls[-1]
    (axis, ranks, _), number = call.group, call.number
    record = {
        "rank": rank,
        "world_size": world_size,
        "host": "",
        "why": "Flight Recorder",
        "time": call.created_ns / 1e9,
        "models": [],
        "calls": {
            axis: {
                "ranks": ranks,
                "completed": number - waits,
                "last": [[number, call.op, call.tensors, call.created_ns]],
            }
        },
        "waits": waits,
        "last": f"{call.op}({call.tensors}), call {number} of {axis}",
    }
    return Stand(rank=rank, record=record, stack=call.stack)


def _read(path: Path) -> list[_Call]:
    """The collectives of a dump, the oldest first."""
    try:
        raw = read_file(path, _MAX_BYTES)
        dump = json.loads(raw) if raw.lstrip()[:1] == b"{" else load_records(raw)
        groups = dump["pg_config"]
        everyone = next(iter(groups.values()), {"ranks": "[]"})
        calls = [
            _call(entry, groups.get(entry["process_group"][0], everyone))
            for entry in dump["entries"]
        ]
    except Exception as error:  # a damaged pickle can make the pickle module raise anything
        raise LaunchError(
            f"{path} is not a dump of torch's Flight Recorder: {type(error).__name__}: {error}. "
            f"Pass files that torch wrote, such as those of TORCH_FR_DUMP_TEMP_FILE, or the folder "
            f"of a launch."
        ) from error
    return sorted(calls, key=lambda call: call.created_ns)


def _call(entry: Mapping[str, Any], group: Mapping[str, Any]) -> _Call:
    op = str(entry["profiling_name"]).partition(":")[2]
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    ranks = tuple(int(rank) for rank in json.loads(group["ranks"]))
    messages = op.partition(" ")[2] if entry["is_p2p"] else ""
    return _Call(
        group=(str(entry["process_group"][1]), ranks, messages),
        number=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
        op=op,
        tensors=", ".join(f"{dtype}{list(size)}" for dtype, size in pairs),
        completed=entry["state"] == "completed",
        created_ns=int(entry["time_created_ns"]),
        stack=tuple(
            Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"]))
            for frame in entry.get("frames") or ()
        ),
    )
