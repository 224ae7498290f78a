"""The one place that starts the processes of a script: torch's elastic launcher."""

import importlib
import json
import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from fxtrain._errors import LaunchError
from fxtrain.launch._ending import Ending, Failure, by_cause
from fxtrain.launch._spec import LaunchSpec, child_arguments, child_environment, elastic_options
from fxtrain.launch._target import check_target

__all__ = ["run"]

# Between asking the ranks to end and ending them.
_SHUTDOWN_S = 10


def run(spec: LaunchSpec) -> Ending:
    """Run a program on all ranks and wait until they have ended.

    The ranks share this process's output. SIGTERM and SIGINT go on to them. When one fails,
    the others are ended.

    Effects:
        Loads torch; sets OMP_NUM_THREADS in this process's environment, which the ranks
        inherit, unless it is set; starts `spec.ranks` processes. Call it in the main thread,
        where signals arrive.

    Raises:
        LaunchError: there is no such program.
    """
    check_target(spec)
    os.environ.update(child_environment(spec, os.environ, cores=usable_cores()))
    # torch takes seconds to load, which a wrong file name need not wait for.
    api = importlib.import_module("torch.distributed.launcher.api")
    _quiet()
    with tempfile.TemporaryDirectory(prefix="fxtrain-launch-") as logs:
        config = _config(api, spec, logs)
        try:
            api.elastic_launch(config, sys.executable)(*child_arguments(spec))
        except api.ChildFailedError as error:
            return Ending(ranks=spec.ranks, failures=by_cause(_failures(error.failures, logs)))
        except api.SignalException as error:
            return Ending(ranks=spec.ranks, signal=int(error.sigval))
    return Ending(ranks=spec.ranks)


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _config(api: Any, spec: LaunchSpec, logs: str) -> Any:
    options = elastic_options(spec, run_id=uuid.uuid4().hex)
    if "shutdown_timeout" in api.LaunchConfig.__dataclass_fields__:  # in newer torch
        options["shutdown_timeout"] = _SHUTDOWN_S
    try:
        return api.LaunchConfig(**options, logs_specs=api.DefaultLogsSpecs(log_dir=logs))
    except (TypeError, ValueError) as error:
        raise LaunchError(f"torch's elastic launcher refused its settings: {error}") from error


def _quiet() -> None:
    """The launcher's own words on failing ranks are left out: what matters is in the ending."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _failures(failed: dict[int, Any], logs: str) -> list[Failure]:
    """What torch saw, and what every rank has written, were it ended in the same moment."""
    codes = {rank: failure.exitcode for rank, failure in failed.items()}
    reports = _reports(Path(logs))
    return [
        Failure(
            rank=rank,
            code=codes.get(rank),
            kind=report.get("kind", ""),
            error=report.get("error", ""),
            traceback=report.get("py_callstack", ""),
            time_ns=int(report.get("time_ns", 0)),
        )
        for rank in sorted(codes.keys() | reports.keys())
        for report in [reports.get(rank, {})]
    ]


def _reports(logs: Path) -> dict[int, dict[str, Any]]:
    """By rank, what the last attempt wrote: folders are RUN/attempt_N/LOCAL_RANK."""
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda path: int(path.name.split("_")[-1]))
    found: dict[int, dict[str, Any]] = {}
    for path in attempts[-1].glob("*/error.json") if attempts else ():
        message = json.loads(path.read_text())["message"]
        if isinstance(message, dict):
            extra = message.get("extraInfo", {})
            rank = int(extra.get("rank", path.parent.name))
            found[rank] = {"error": message.get("message", ""), **extra}
    return found
