"""Reads runs of the JSON lines tracker."""

import json
from typing import Any

import attrs

from fxtrain._display import describe
from fxtrain._errors import PlanError
from fxtrain._reading import StrPath, lines_of, open_file
from fxtrain.trackers.json_lines import file_name
from fxtrain.trackers.run_folder import folder_of, read_identity


@attrs.frozen(kw_only=True, eq=False)
class RunLog:
    """The entries of one rank of a run.

    Attributes:
        id: Id of the run.
        starts: Each start of the run, with `step` and `params`: the first, and one for each time it
            was resumed.
        entries: All other lines in order: `step`, `rows`, `epoch`, `time`, and one of
            `values`, `text`, `image`, `table` and `artifact`, by name.
        damaged: Number of invalid lines that were skipped.
    """

    id: str
    starts: tuple[dict[str, Any], ...] = attrs.field(repr=describe)
    entries: tuple[dict[str, Any], ...] = attrs.field(repr=describe)
    damaged: int = 0

    def curve(self, name: str, over: str = "step") -> list[tuple[float, float]]:
        """The values of one metric.

        Args:
            over: The other axis: step, rows or time.
        """
        return [
            (entry[over], float(entry["values"][name]))
            for entry in self.entries
            if name in entry.get("values", ())
        ]


def read_run(path: StrPath, *, file: str = "metrics.jsonl", rank: int = 0) -> RunLog:
    """Read the run in a folder.

    Args:
        file: File name in the tracker's config.
        rank: The rank to read; other than 0 only if all ranks tracked.

    Raises:
        PlanError: the folder has no run, or not this file.

    Example:
        >>> import fxtrain as fx, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.track(folder, ctx, settings={"lr": 0.1}) as run:
        ...         run.log({"loss": float("nan")}, 1)
        >>> log = read_run(folder)
        >>> log.curve("loss"), log.starts[0]["params"]["lr"]
        ([(1, nan)], 0.1)
    """
    folder = folder_of(path)
    place = folder / file_name(file, rank)
    try:
        identity = read_identity(folder)
        with open_file(place) as lines:
            entries = [_read(line) for line in lines_of(lines)]
    except OSError as error:
        raise PlanError(f"read_run({str(path)!r}): {error}.") from error
    if identity is None:
        raise PlanError(
            f"read_run({str(path)!r}): this folder has no run.json, so there is no run in it."
        )
    valid = [entry for entry in entries if entry is not None]
    return RunLog(
        id=identity.id,
        starts=tuple({**entry, **entry["start"]} for entry in valid if "start" in entry),
        entries=tuple(entry for entry in valid if "start" not in entry),
        damaged=len(entries) - len(valid),
    )


def _read(line: bytes | None) -> dict[str, Any] | None:
    try:
        data = None if line is None else json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and type(data.get("step")) is int else None
