"""Scripts, over torch's elastic launcher."""

import logging
import os
import sys
import tempfile
import uuid
from pathlib import Path

from fxtrain.launch._spec import LaunchSpec, command, shared_variables, tail

__all__ = ["run_script"]


def run_script(spec: LaunchSpec) -> int:
    """Start every rank of a script, wait, and return the exit code.

    Rank 0 writes to this terminal. The standard error of the other ranks goes to files; if
    one of them fails first, its end is shown.

    Effects:
        Starts processes; ends them all when one fails or this process is told to stop.

    Raises:
        LaunchError: the script is not there.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    argv = command(spec)
    # What went wrong is told below, once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.update(shared_variables(os.environ, spec.ranks, os.cpu_count() or 1))
    with tempfile.TemporaryDirectory(prefix="fxtrain-", ignore_cleanup_errors=True) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=spec.ranks,
            run_id=uuid.uuid4().hex[:8],
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=spec.restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(
                log_dir=folder, redirects={rank: Std.ERR for rank in range(1, spec.ranks)}
            ),
        )
        try:
            elastic_launch(config, sys.executable)(*argv)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            _show_failure(rank, failure.exitcode, Path(folder))
            return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _show_failure(rank: int, code: int, folder: Path) -> None:
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    logs = sorted(folder.glob(f"**/{rank}/stderr.log"))
    text = logs[-1].read_text(errors="replace").splitlines() if logs and rank else []
    shown = "\n".join(part for part in (tail(text), f"fxtrain: rank {rank} failed first, {how}.") if part)
    sys.stderr.write(shown + "\n")
