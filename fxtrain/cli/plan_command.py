"""`fxtrain plan`: runs a script as one simulated rank of many, and shows what it would need.

The script runs in this process. Its environment says which rank it is, in the variables of a
launcher, so that `fx.detect` in the script finds it.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import attrs
import click
from rich.console import Group

from fxtrain._display import read_bytes
from fxtrain._reading import read_text, write_file
from fxtrain.cli.output import COUNT, NOT_NEGATIVE, POSITIVE, Exit, Words, as_json, option, report
from fxtrain.cli.tables import picture_option, save_picture
from fxtrain.errors import FxError
from fxtrain.launchers import LaunchSpec, check_target
from fxtrain.launchers.child import become
from fxtrain.launchers.config import resolve
from fxtrain.launchers.program import plan_variable
from fxtrain.launchers.spec import name_values
from fxtrain.state import DryRun, dumps, loads

_AT_LEAST_0 = click.FloatRange(min=0)
_SAVED = click.Path(exists=True, dir_okay=False)  # by --save


def _rehearsed(target: str, args: Sequence[str], *, module: bool, **settings: Any) -> DryRun | None:
    """What a program needs, which sees itself started as usual; None if it failed."""

    def run() -> None:
        try:
            become("module" if module else "script", target)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise

    sys.argv[:] = [target, *args]
    name = os.path.basename(target)
    try:
        with redirect_stdout(sys.stderr):  # the results go to standard output
            runs = importlib.import_module("fxtrain.profiling")
            return runs.rehearse(run, os.environ, name=name, **settings)
    except FxError:
        raise
    except Exception:  # of the program
        traceback.print_exc()
        return None


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
@option("--save", "write the result as JSON; with --choose, the launch file", metavar="FILE")
@picture_option("--picture", "draw the memory of a step")
@option("--rank-mtbf-h", "mean time between failures of one rank: shows goodput", POSITIVE, "HOURS")
@option("--checkpoint-rate", "bytes per second that all ranks write", metavar="SIZE", default="1GB")
@option("--restart-s", "seconds from a failure to the next update", _AT_LEAST_0, default=120.0)
@option("--repair-h", "hours until a failed rank is a spare", _AT_LEAST_0, default=24.0)
@option("--spares", "ranks that stand by, to compare", Words(NOT_NEGATIVE), "N,...", default="0")
@option("--days", "training without failures", POSITIVE, default=30.0)
@option("--seed", "of the simulated failures", int, default=0, show_default=True)
@picture_option("--goodput-picture", "draw goodput over intervals")
@option("--choose", "try many plans, and show the fastest that fit", is_flag=True)
@option("--device", "with --choose: a name such as H100, or a file of env --measure", str, "DEVICE")
@option("--rows", "with --choose: rows of an update, by default the script's", COUNT, "N")
@option("--batch-option", "with --choose: the script's option for the batch size", metavar="NAME")
@option("--minutes", "with --choose: time for the search", POSITIVE, default=10.0)
@option("--processes", "with --choose: dry runs at a time, by default one per core", COUNT, "N")
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
    choose: bool,
    **options: Any,
) -> int:
    """Show what a training script would need on many ranks, without running it for real.

    The script runs on tensors without values, as one rank of that world, until its steps
    repeat. Shown are memory by use, traffic by kind and mesh axis, and problems. The
    plan of a launch file is passed to the script, as `fxtrain launch` does. With
    --rank-mtbf-h, failures are simulated, and goodput is shown.

    With --choose, the script has dry runs under many plans, and the fastest that fit are
    shown; --save writes the launch file of the best one, for `fxtrain launch --config`.
    """
    target, args = program[0], tuple(program[1:])
    check_target(LaunchSpec(target=target, args=args, ranks=1, module=module))
    runs = importlib.import_module("fxtrain.profiling")
    flags = {} if mesh is None else {"plan.mesh": mesh}
    settings = resolve(file=config, env=os.environ, flags=flags)
    if choose:
        if options["device"] is None:
            raise click.UsageError("--choose needs --device, such as --device H100.")
        choosing = importlib.import_module("fxtrain.cli.choose_command")
        shape = {"world": world, "module": module, "save": save, "picture": picture}
        return choosing.choose_plan(program, settings, **shape, options=options)
    variables = runs.place(world, rank, settings.plan.mesh)
    runs.read_bytes(device_memory)
    rate = read_bytes(options["checkpoint_rate"], "--checkpoint-rate")
    others = [loads(read_text(path), DryRun) for path in against]
    if settings.values["plan"]:
        variables |= name_values((plan_variable(settings.values["plan"]),))
    os.environ.update(variables)
    run = _rehearsed(
        target, args, module=module, mesh=settings.plan.mesh, device_memory=device_memory
    )
    if run is None:
        return Exit.FOUND
    text = dumps(run)
    if save is not None:
        write_file(save, text)
    if picture is not None:
        save_picture(runs.plot(run), picture)
    # A program that failed before its model was there has problems to show instead.
    known = runs.checkpoint_bytes(run) > 0
    goodput = None
    if known and options["rank_mtbf_h"] is not None:
        goodput = _goodput(run, options, rate or 1)
        if options["goodput_picture"] is not None:
            save_picture(goodput.plot(), options["goodput_picture"])
    data, shown = json.loads(text), [runs.table(*others, run)]
    if goodput is not None:
        data = {"run": data, "goodput": attrs.asdict(goodput)}
        shown.append(goodput)
    report(data, Group(*shown))
    return Exit.WELL if run.fits else Exit.FOUND
