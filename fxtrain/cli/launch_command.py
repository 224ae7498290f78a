"""`fxtrain launch`: runs a program on ranks of this machine, of others, or of a cluster."""

import os
from collections.abc import Mapping
from typing import Any

import attrs
import click
from click.shell_completion import CompletionItem

from fxtrain.cli.output import NOT_NEGATIVE, PAIR, Words, as_json, report, warn
from fxtrain.errors import LaunchError
from fxtrain.launchers import (
    LAUNCHERS,
    LaunchSpec,
    check_target,
    describe,
    find_launcher,
    prepare,
    run,
    show,
)
from fxtrain.launchers.config import from_flags, resolve
from fxtrain.launchers.machine import default_ranks
from fxtrain.launchers.outcome import keep_tracebacks
from fxtrain.launchers.program import check_mesh, plan_variable
from fxtrain.launchers.spec import FLAGS, PLAN_FLAGS, Flag


def spec_of(options: Mapping[str, Any]) -> LaunchSpec:
    """The spec from parsed options, on top of the launch file and the environment.

    Imports torch if the number of ranks is not given and accelerators must be counted.
    """
    plan = [
        f"{flag.field}={options[_name(flag)] if flag.metavar else 'true'}"
        for flag in PLAN_FLAGS
        if options[_name(flag)]
    ]
    flags = {f"launch.{name}": value for name, value in _given_fields(options).items()}
    flags |= from_flags((*plan, *options["words"]))
    config = resolve(file=options["config"], env=os.environ, flags=flags)
    said, spec = config.values["launch"], config.launch
    if "target" not in said:
        raise click.UsageError("Missing program. Name a script, or a module after -m.")
    if given := dict(options["option"]):
        before = spec.options if isinstance(spec.options, Mapping) else {}
        spec = attrs.evolve(spec, options={**before, **given})
    if find_launcher(spec).here:
        check_target(spec)
    if "ranks" not in said:
        spec = attrs.evolve(spec, ranks=default_ranks(spec))
    if not config.values["plan"]:
        return spec
    check_mesh(spec, config.plan)
    # For fx.detect, fx.wrap and fx.shard in the script.
    return attrs.evolve(spec, env=(*spec.env, plan_variable(config.values["plan"])))


def _launch(**options: Any) -> int:
    spec = spec_of(options)
    if options["dry"]:
        invocation = prepare(spec)
        report(attrs.asdict(invocation), show(invocation))
        return 0
    ending = run(spec)
    if ending.code:
        kept = keep_tracebacks(ending, spec.log_dir)
        more = f"\nThe tracebacks of all ranks are in {kept}." if kept else ""
        warn(f"fxtrain launch: {describe(ending)}{more}")
    return ending.code


def _given_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields set on the command line."""
    said = {
        flag.field: tuple(value) if flag.many else value
        for flag in FLAGS
        if (value := options[flag.field]) not in (None, "", ()) and value is not False
    }
    if "env" in said:
        said["env"] = tuple(map(_variable, said["env"]))
    target, *args = options["program"] or [""]
    return {**said, "target": target, "args": tuple(args)} if target else said


def _variable(word: str) -> str:
    """NAME=VALUE; a name alone takes its value from here, so no secret is on a command line."""
    if not word.isidentifier():  # NAME=VALUE, or something that the record refuses
        return word
    if word not in os.environ:
        raise LaunchError(
            f"--env {word}: this variable is not set here. Set it, or write {word}=VALUE."
        )
    return f"{word}={os.environ[word]}"


def _files(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    return [CompletionItem(start, type="file")]


def _name(flag: Flag) -> str:
    """The name of a flag's value among the parsed options."""
    return flag.field.replace(".", "_")


def _option(flag: Flag) -> click.Option:
    names = ["-n", flag.flag] if flag.field == "ranks" else [flag.flag]
    kinds = {field.name: field.type for field in attrs.fields(LaunchSpec)}
    kind: Any = {int: int, float: float, int | None: int}.get(kinds.get(flag.field, str), str)
    if flag.many == ",":
        kind = Words(NOT_NEGATIVE if flag.field == "show_ranks" else click.STRING)
    if not flag.metavar:
        return click.Option([*names, _name(flag)], is_flag=True, help=flag.help)
    choices = list(LAUNCHERS) if flag.field == "launcher" else []
    return click.Option(
        [*names, _name(flag)],
        type=kind,
        multiple=flag.many == "again",
        metavar=flag.metavar,
        help=flag.help + (f": {', '.join(choices)}" if choices else ""),
    )


LAUNCH = click.Command(
    "launch",
    callback=_launch,
    help="Run a program on ranks of this machine, of several machines, or of a cluster.",
    options_metavar="[OPTIONS]",
    # Everything after the program is passed to it.
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
    params=[
        click.Option(["--config", "-c"], default="", metavar="FILE", help="the launch file"),
        *map(_option, FLAGS),
        *map(_option, PLAN_FLAGS),
        click.Option(
            ["--set", "words"], multiple=True, metavar="PATH=VALUE",
            help="any other field of the launch or the plan, such as plan.seed=7",
        ),
        click.Option(
            ["-o", "--option", "option"], type=PAIR, multiple=True, metavar="NAME=VALUE",
            help="an option of this launcher only",
        ),
        click.Option(["--dry"], is_flag=True, help="print what would be started, and exit"),
        click.Argument(
            ["program"], nargs=-1, type=click.UNPROCESSED, shell_complete=_files,
            metavar="(SCRIPT | -m MODULE) [ARGS ...]",
        ),
    ],
)  # fmt: skip
as_json(LAUNCH)
