"""The errors that ranks have written for their launcher."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxtrain.launchers.outcome import Failure, LaunchResult, is_own


def read_reports(paths: Iterable[Path]) -> dict[int, dict[str, Any]]:
    """By rank, what the ranks wrote, in the format of `child.py`."""
    found: dict[int, dict[str, Any]] = {}
    for path in paths:
        message = json.loads(path.read_text())["message"]
        if isinstance(message, dict):  # otherwise torch wrote it, for its own errors
            extra = message.get("extraInfo", {})
            rank = int(extra.get("rank", 0))
            found[rank] = {"error": message.get("message", ""), **extra}
    return found


def to_failures(codes: dict[int, int], reports: dict[int, dict[str, Any]]) -> list[Failure]:
    """What the launcher observed and what ranks wrote, combined."""
    return [
        Failure(
            rank=rank,
            code=codes.get(rank, report.get("code")),
            kind=report.get("kind", ""),
            error=report.get("error", ""),
            traceback=report.get("py_callstack", ""),
            time_ns=int(report.get("time_ns", 0)),
        )
        for rank in sorted(codes.keys() | reports.keys())
        for report in [reports.get(rank, {})]
    ]


def keep_tracebacks(result: LaunchResult, folder: str) -> Path | None:
    """Write failures to a file of each rank, unless there is one that is printed as a whole.

    Args:
        result: How a launch ended.
        folder: Where to write; a fresh temporary folder if empty.

    Returns:
        The folder, or None if there was nothing to write.

    Effects:
        Writes RANK.txt for each rank with a traceback, including the first.
    """
    written = [failure for failure in result.failures if failure.traceback]
    if len(written) < 2 and not any(map(is_own, written)):
        return None
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="tracebacks-", dir=folder or None))
    for failure in written:
        (place / f"{failure.rank}.txt").write_text(failure.traceback)
    return place
