"""`fxtrain plan`: runs a script as one simulated rank of many, and shows what it would need."""

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

from fxtrain._display import read_bytes
from fxtrain._reading import read_text, write_file
from fxtrain.cli.output import (
    POSITIVE,
    Exit,
    as_json,
    check_picture,
    option,
    print_json,
    save_picture,
)
from fxtrain.errors import LaunchError, PlanError
from fxtrain.launchers import LaunchSpec, check_target, plan_variable
from fxtrain.launchers.spec import name_values

_AT_LEAST_0 = click.FloatRange(min=0)
_STDERR = 2  # for the program's output; the results go to standard output


def _in_a_process(request: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, int]:
    """The result as JSON text, or the exit code if there is none."""
    with tempfile.TemporaryDirectory(prefix="fxtrain-plan-") as folder:
        out = Path(folder) / "run.json"
        line = [sys.executable, "-m", "fxtrain.cli.plan_child", json.dumps(request), str(out)]
        env = {**os.environ, **variables}
        done = subprocess.run(line, env=env, stdout=_STDERR, check=False)
        return (out.read_text(encoding="utf-8") if out.exists() else ""), done.returncode


def _spares(failures: Mapping[str, Any]) -> tuple[int, ...]:
    words = failures["spares"].split(",")
    if not all(word.strip().isdecimal() and len(word) < 8 for word in words):
        raise PlanError(
            f"--spares {failures['spares'][:40]}: pass numbers of ranks between commas, such as "
            f"0,8,64."
        )
    return tuple(int(word) for word in words)


def _goodput(run: Any, failures: Mapping[str, Any], rate: int, spares: Sequence[int]) -> Any:
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
    return runs.goodput(setup, work_s=work_s, spares=spares, seed=failures["seed"])


def _read(path: str, state: Any) -> Any:
    try:
        text = read_text(path)
    except OSError as error:
        raise LaunchError(
            f"--against {path}: {error}. Name a file written by `fxtrain plan --save`."
        ) from error
    return state.loads(text, state.DryRun)


def _print(shown: Any) -> None:
    console = importlib.import_module("rich.console").Console(file=sys.stdout)
    console.print(shown)


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
@option("--against", "compare with an earlier run", metavar="FILE", multiple=True)
@option("--save", "write the result as JSON", metavar="FILE")
@option("--picture", "draw the memory of a step: .svg, .png, .pdf", metavar="FILE")
@option("--rank-mtbf-h", "mean time between failures of one rank: shows goodput", POSITIVE, "HOURS")
@option("--checkpoint-rate", "bytes per second that all ranks write", metavar="SIZE", default="1GB")
@option("--restart-s", "seconds from a failure to the next update", _AT_LEAST_0, default=120.0)
@option("--repair-h", "hours until a failed rank is a spare", _AT_LEAST_0, default=24.0)
@option("--spares", "ranks that stand by, to compare", metavar="N,...", default="0")
@option("--days", "training without failures", POSITIVE, default=30.0)
@option("--seed", "of the simulated failures", int, default=0, show_default=True)
@option("--goodput-picture", "draw goodput over intervals", metavar="FILE")
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
    json_: bool,
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
    state = importlib.import_module("fxtrain.state")
    runs = importlib.import_module("fxtrain.profiling")
    flags = {} if mesh is None else {"plan.mesh": mesh}
    settings = importlib.import_module("fxtrain.launchers.config").resolve(
        file=config, env=os.environ, flags=flags
    )
    variables = runs.place(world, rank, settings.plan.mesh)
    runs.read_bytes(device_memory)
    check_picture(picture)
    check_picture(failures["goodput_picture"])
    rate, spares = read_bytes(failures["checkpoint_rate"], "--checkpoint-rate"), _spares(failures)
    others = [_read(path, state) for path in against]
    if settings.values["plan"]:
        variables |= name_values((plan_variable(settings.plan),))
    request = {"target": target, "args": args, "module": module, "device_memory": device_memory}
    text, code = _in_a_process(request, variables)
    if code or not text:
        return code or Exit.FOUND
    run = state.loads(text, state.DryRun)
    if save is not None:
        write_file(save, text)
    if picture is not None:
        save_picture(runs.plot(run), picture)
    # A program that failed before its model was there has problems to show instead.
    known = runs.checkpoint_bytes(run) > 0
    goodput = None
    if known and failures["rank_mtbf_h"] is not None:
        goodput = _goodput(run, failures, rate or 1, spares)
        if failures["goodput_picture"] is not None:
            save_picture(goodput.plot(), failures["goodput_picture"])
    if json_ and goodput is not None:
        print_json({"run": json.loads(text), "goodput": attrs.asdict(goodput)})
    elif json_:
        sys.stdout.write(text)
    else:
        _print(runs.table(*others, run))
        if goodput is not None:
            _print(goodput)
    return Exit.WELL if run.fits else Exit.FOUND
