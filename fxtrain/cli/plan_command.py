"""`fxtrain plan`: runs a script as one simulated rank of many, and shows what it would need.

Run as a module, `python -m fxtrain.cli.plan_command REQUEST OUT`, this is the process in which the
script runs. Its environment says which rank it is, in the variables of a launcher, so that
`fx.detect` in the script finds it.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Group

from fxtrain._display import read_bytes
from fxtrain._reading import read_text, write_file
from fxtrain.cli.output import (
    NOT_NEGATIVE,
    POSITIVE,
    Exit,
    Words,
    as_json,
    option,
    picture_option,
    report,
    save_picture,
)
from fxtrain.errors import FxError
from fxtrain.launchers import LaunchSpec, check_target
from fxtrain.launchers.child import become
from fxtrain.launchers.config import resolve
from fxtrain.launchers.program import plan_variable
from fxtrain.launchers.spec import name_values
from fxtrain.state import DryRun, dumps, loads

_AT_LEAST_0 = click.FloatRange(min=0)
_SAVED = click.Path(exists=True, dir_okay=False)  # by --save
_STDERR = 2  # for the program's output; the results go to standard output


def _in_a_process(request: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, int]:
    """The result as JSON text, or the exit code if there is none."""
    with tempfile.TemporaryDirectory(prefix="fxtrain-plan-") as folder:
        out = Path(folder) / "run.json"
        line = [sys.executable, "-m", __name__, json.dumps(request), str(out)]
        env = {**os.environ, **variables}
        done = subprocess.run(line, env=env, stdout=_STDERR, check=False)
        return (out.read_text(encoding="utf-8") if out.exists() else ""), done.returncode


def _goodput(run: DryRun, failures: Mapping[str, Any], rate: int) -> Any:
    """Goodput of a run under simulated failures."""
    runs = importlib.import_module("fxtrain.profiling")
    setup = runs.Failures(
        ranks=run.world,
        rank_mtbf_s=3600 * failures["rank_mtbf_h"],
        checkpoint_s=runs.checkpoint_bytes(run) / rate,
        restart_s=failures["restart_s"],
        repair_s=3600 * failures["repair_h"],
    )
    work_s = 86400 * failures["days"]
    return runs.goodput(setup, work_s=work_s, spares=failures["spares"], seed=failures["seed"])


@click.command(
    "plan",
    options_metavar="--world N [OPTIONS]",
    # Everything after the program is passed to it.
    context_settings={"allow_interspersed_args": False},
)
@option("--world -n", "world size to simulate", int, "N", required=True)
@option("--rank", "rank to run as", int, "R", default=0, show_default=True)
@option("--mesh", "ranks per axis, such as shard=8,tensor=2", metavar="AXES")
@option("--device-memory", "memory of one device, such as 80GB or 24GiB", metavar="SIZE")
@option("--against", "compare with an earlier run", _SAVED, "FILE", multiple=True)
@option("--save", "write the result as JSON", metavar="FILE")
@picture_option("--picture", "draw the memory of a step")
@option("--rank-mtbf-h", "mean time between failures of one rank: shows goodput", POSITIVE, "HOURS")
@option("--checkpoint-rate", "bytes per second that all ranks write", metavar="SIZE", default="1GB")
@option("--restart-s", "seconds from a failure to the next update", _AT_LEAST_0, default=120.0)
@option("--repair-h", "hours until a failed rank is a spare", _AT_LEAST_0, default=24.0)
@option("--spares", "ranks that stand by, to compare", Words(NOT_NEGATIVE), "N,...", default="0")
@option("--days", "training without failures", POSITIVE, default=30.0)
@option("--seed", "of the simulated failures", int, default=0, show_default=True)
@picture_option("--goodput-picture", "draw goodput over intervals")
@option("--config -c", "launch file with the plan", metavar="FILE", default="")
@option("-m module", "the program is a module, not a script", is_flag=True)
@click.argument(
    "program",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="(SCRIPT | -m MODULE) [ARGS ...]",
)
@as_json
def PLAN(
    program: Sequence[str],
    *,
    world: int,
    rank: int,
    module: bool,
    mesh: str | None,
    device_memory: str | None,
    against: Sequence[str],
    save: str | None,
    picture: str | None,
    config: str,
    **failures: Any,
) -> int:
    """Show what a training script would need on many ranks, without running it for real.

    The script runs on tensors without values, as one rank of that world, until its steps
    repeat. Shown are memory by use, traffic by kind and mesh axis, and problems. The
    plan of a launch file is passed to the script, as `fxtrain launch` does. With
    --rank-mtbf-h, failures are simulated, and goodput is shown.
    """
    target, args = program[0], tuple(program[1:])
    check_target(LaunchSpec(target=target, args=args, ranks=1, module=module))
    runs = importlib.import_module("fxtrain.profiling")
    flags = {} if mesh is None else {"plan.mesh": mesh}
    settings = resolve(file=config, env=os.environ, flags=flags)
    variables = runs.place(world, rank, settings.plan.mesh)
    runs.read_bytes(device_memory)
    rate = read_bytes(failures["checkpoint_rate"], "--checkpoint-rate")
    others = [loads(read_text(path), DryRun) for path in against]
    if settings.values["plan"]:
        variables |= name_values((plan_variable(settings.plan),))
    request = {"target": target, "args": args, "module": module, "device_memory": device_memory}
    text, code = _in_a_process(request, variables)
    if code or not text:
        return code or Exit.FOUND
    run = loads(text, DryRun)
    if save is not None:
        write_file(save, text)
    if picture is not None:
        save_picture(runs.plot(run), picture)
    # A program that failed before its model was there has problems to show instead.
    known = runs.checkpoint_bytes(run) > 0
    goodput = None
    if known and failures["rank_mtbf_h"] is not None:
        goodput = _goodput(run, failures, rate or 1)
        if failures["goodput_picture"] is not None:
            save_picture(goodput.plot(), failures["goodput_picture"])
    data, shown = json.loads(text), [runs.table(*others, run)]
    if goodput is not None:
        data = {"run": data, "goodput": attrs.asdict(goodput)}
        shown.append(goodput)
    report(data, Group(*shown))
    return Exit.WELL if run.fits else Exit.FOUND


def rehearse_program() -> int:
    """Run the program that the arguments name, write the results, and return the exit code."""
    request, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    sys.argv[:] = [request["target"], *request["args"]]
    plan = importlib.import_module("fxtrain.ops.connecting").launched_plan()

    def run() -> None:
        try:
            become("module" if request["module"] else "script", request["target"])
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    try:
        rehearsed = importlib.import_module("fxtrain.profiling").rehearse(
            run,
            os.environ,
            name=os.path.basename(request["target"]),
            mesh=None if plan is None else plan.mesh,
            device_memory=request["device_memory"],
        )
    except FxError as error:
        sys.stderr.write(f"fxtrain plan: {type(error).__name__}: {error}\n")
        return Exit.WRONG
    out.write_text(dumps(rehearsed), encoding="utf-8")
    return Exit.WELL


if __name__ == "__main__":
    sys.exit(rehearse_program())
