"""`fxtrain plan --choose`: dry runs of a script under many plans, and a launch file of the best."""

import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fxtrain._reading import write_file
from fxtrain.choosing.candidates import Question, Trial
from fxtrain.choosing.devices import read_device
from fxtrain.choosing.report import Choice
from fxtrain.choosing.searching import search
from fxtrain.choosing.trials import Look, batch_size
from fxtrain.cli.output import Exit, report, warn
from fxtrain.cli.tables import save_picture
from fxtrain.errors import FxError, PlanError
from fxtrain.launchers.child import become
from fxtrain.launchers.config import LaunchConfig, launch_config, render
from fxtrain.launchers.program import plan_variable
from fxtrain.launchers.spec import name_values
from fxtrain.profiling import place, rehearse
from fxtrain.state import DryRun, Plan, unstructure
from fxtrain.state.files import format_of

_CHOSEN = ("strategy", "mesh", "accumulate", "recompute")


def choose_plan(
    program: Sequence[str],
    config: LaunchConfig,
    *,
    world: int,
    module: bool,
    save: str | None,
    picture: str | None,
    options: Mapping[str, Any],
) -> int:
    """Choose a plan for a program, and print, save and draw the choice."""
    if save is not None:
        format_of(save)
    device, given = read_device(options["device"]), dict(config.values["plan"])
    batch_option = options["batch_option"] or ""
    place(world, 0, config.plan.mesh)
    target, *args = program
    question = Question(
        plan=Plan(mesh=config.plan.mesh),
        own_plan=True,
        fixed=frozenset(given),
        world=world,
        node=device.ranks_per_node,
        rows=options["rows"],
        rows_fixed=not batch_option,
    )
    run = partial(run_script, target, tuple(args), batch_option, json.dumps(given), module=module)
    try:
        with _progress() as progress:
            choice = search(
                run,
                question,
                device,
                probe=(Plan(), 0),
                minutes=options["minutes"],
                processes=options["processes"],
                cache=_cache_folder(os.environ),
                progress=progress,
            )
    except FxError:
        raise
    except Exception:  # of the program
        traceback.print_exc()
        return Exit.FOUND
    if picture is not None:
        save_picture(choice.plot(), picture)
    report(choice.data(), choice)
    if not choice.table:
        return Exit.FOUND
    if save is not None:
        best = choice.best
        words = _words(tuple(args), batch_option, best.batch_size)
        write_file(save, _launch_file(save, config, choice, target, words, module=module))
        warn(f"Wrote {save}. Start it with `fxtrain launch --config {shlex.quote(save)}`.")
    return Exit.WELL


def run_script(
    target: str,
    args: tuple[str, ...],
    batch_option: str,
    given: str,
    attempt: Trial,
    world: int,
    rank: int,
    look: Look,
    *,
    module: bool,
) -> DryRun:
    """A dry run of a script under a plan; with 0 rows, under its own. Its rest is a `Program`.

    Effects:
        Those of the script. Variables, arguments and the path of this process are put back.
    """
    plan, size = attempt
    values = json.loads(given)
    if size:
        values |= _chosen(plan)
    else:
        values.pop("mesh", None)  # on one rank
    variables = place(world, rank, plan.mesh)
    variables |= name_values((plan_variable(values),)) if values else {}
    words = _words(args, batch_option, batch_size(attempt)) if size else args

    def call() -> None:
        try:
            become("module" if module else "script", target)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise PlanError(f"{target} exits with {end.code}.") from end

    with _as_program((target, *words), variables):
        name, mesh = os.path.basename(target), plan.mesh
        return rehearse(call, variables, name=name, mesh=mesh, device_memory=None, look=look)


@contextmanager
def _as_program(argv: tuple[str, ...], variables: Mapping[str, str]) -> Iterator[None]:
    before = [*sys.argv], [*sys.path], dict(os.environ)
    sys.argv[:] = argv
    os.environ.update(variables)
    try:
        yield
    finally:
        sys.argv[:], sys.path[:], environment = before
        os.environ.clear()
        os.environ.update(environment)


def _chosen(plan: Plan) -> dict[str, Any]:
    """The fields of a plan that a search varies, as plain data."""
    data = unstructure(plan)
    usual = unstructure(type(plan.strategy)())
    strategy = {
        name: value
        for name, value in data["strategy"].items()
        if name == "kind" or value != usual[name]
    }
    return {**{name: data[name] for name in _CHOSEN}, "strategy": strategy}


def _words(args: tuple[str, ...], option: str, size: int) -> tuple[str, ...]:
    """The arguments of a program with another batch size."""
    if not option:
        return args
    kept: list[str] = []
    words = iter(args)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return (*kept, option, str(size))


def _launch_file(
    path: str,
    config: LaunchConfig,
    choice: Choice,
    target: str,
    args: tuple[str, ...],
    *,
    module: bool,
) -> str:
    """The launch file with the best plan, on top of the values that were given."""
    local = min(choice.world, choice.device.ranks_per_node)
    ranks = local if choice.world % local == 0 else choice.world
    own = {"target": target, "args": list(args), "ranks": ranks, "nodes": choice.world // ranks}
    launch = {**config.values["launch"], **own} | ({"module": True} if module else {})
    plan = {**config.values["plan"], **_chosen(choice.plan)}
    values = {"launch": launch, "plan": plan}
    launch_config(values)
    note = (
        f"Chosen by fxtrain plan --choose for {choice.world} x {choice.device.name}: "
        f"{choice.rows} rows in {choice.best.cost.seconds:.3g} s."
    )
    return render(values, format_of(path), notes=(note,), brief=True)


def _cache_folder(env: Mapping[str, str]) -> str:
    home = env.get("XDG_CACHE_HOME") or (env["HOME"] + "/.cache" if env.get("HOME") else "")
    return str(Path(home, "fxtrain", "dry_runs")) if home else ""


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress bar on standard error, in a terminal only."""
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("dry runs", total=None)

        def progress(done: int, left: int) -> None:
            bar.update(task, completed=done, total=done + left)

        yield progress
