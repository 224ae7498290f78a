"""`fxtrain launch`: a program on ranks of this machine, of others, or of a cluster."""

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click
from click.shell_completion import CompletionItem

from fxtrain._errors import LaunchError, escape_unprintable
from fxtrain.launch import (
    FLAGS,
    LAUNCHERS,
    Flag,
    LaunchSpec,
    as_json,
    check_target,
    describe,
    find_launcher,
    keep_tracebacks,
    load_torch,
    plan_variable,
    prepare,
    run,
    show,
)

__all__ = ["LAUNCH", "spec_of"]

# Where a launch file may be without being named; to read one takes time, to look does not.
_FILES = ("fxtrain.toml", "fxtrain.yaml", "fxtrain.yml")
# Options of launchers that have flags of their own: those of mpirun's and DeepSpeed's users.
_SHORT = {
    "hostfile": ("FILE", "machines and their slots; as -o hostfile=FILE"),
    "include": ("HOSTS", "with deepspeed: only these, worker-0@worker-1:0,2"),
    "exclude": ("HOSTS", "with deepspeed: all but these"),
}
_VARIABLES = ("FXTRAIN_CONFIG", "FXTRAIN_PROFILE", "FXTRAIN_LAUNCH__", "FXTRAIN_PLAN__")


def spec_of(options: Mapping[str, Any]) -> LaunchSpec:
    """The spec that parsed options describe, over what a launch file and the environment say.

    Effects:
        Loads torch where the number of ranks is not said and accelerators are to be counted.

    Raises:
        LaunchError: a value does not fit, or the program is not there.
        PlanError: the launch file makes no sense.
    """
    flags = _given_fields(options)
    spec, said = _configured(options, flags) if _is_configured(options) else (None, flags)
    if "target" not in said:
        raise click.UsageError("Which program? Name a script, or a module after -m.")
    spec = spec or LaunchSpec(**flags)
    short = {name: options[name] for name in _SHORT if options[name]}
    if given := {**short, **dict(map(_pair, options["option"]))}:
        spec = attrs.evolve(spec, options={**_plain(spec.options), **given})
    if find_launcher(spec).here:
        check_target(spec)
    return spec if "ranks" in said else attrs.evolve(spec, ranks=_default_ranks(spec))


def _launch(**options: Any) -> int:
    spec = spec_of(options)
    if options["dry"]:
        invocation = prepare(spec)
        click.echo(as_json(invocation) if options["json_"] else show(invocation))
        return 0
    ending = run(spec)
    if ending.code:
        kept = keep_tracebacks(ending, spec.log_dir)
        more = f"\nThe tracebacks of all ranks are in {kept}." if kept else ""
        sys.stderr.write(escape_unprintable(f"fxtrain launch: {describe(ending)}{more}\n"))
    return ending.code


def _default_ranks(spec: LaunchSpec) -> int:
    """One per GPU that was chosen, or per accelerator of this machine."""
    if spec.gpus:
        return len(spec.gpus)
    if spec.launcher != "native" or spec.cpu or spec.executable:
        return 1
    return max(1, load_torch("torch").accelerator.device_count())


def _given_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the command line sets."""
    said = {
        flag.field: _value(flag, options[flag.field])
        for flag in FLAGS
        if options[flag.field] is not None and options[flag.field] not in ("", ())
        if flag.metavar or options[flag.field]
    }
    target, *args = options["program"] or [""]
    return {**said, "target": target, "args": tuple(args)} if target else said


def _value(flag: Flag, value: Any) -> Any:
    if flag.field == "env":
        return tuple(map(_variable, value))
    if flag.many != ",":
        return value
    words = [word.strip() for word in value.split(",") if word.strip()]
    if flag.field != "show_ranks":
        return tuple(words)
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise LaunchError(
            f"{flag.flag}={value if len(value) < 80 else value[:80] + '...'}: numbers of ranks "
            f"with commas between them were expected."
        )
    return tuple(int(word) for word in words)


def _variable(word: str) -> str:
    """NAME=VALUE; of a name alone the value here, so that no secret is in a command line."""
    if not word.isidentifier():  # NAME=VALUE, or what the record refuses
        return word
    if word not in os.environ:
        raise LaunchError(
            f"--env {word}: no variable of that name is set here. Set it, or write {word}=VALUE."
        )
    return f"{word}={os.environ[word]}"


def _is_configured(options: Mapping[str, Any]) -> bool:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    files = (*map(Path, _FILES), Path(home, "fxtrain", "launch.toml"))
    return bool(
        options["config"]
        or options["profile"]
        or any(name.startswith(_VARIABLES) for name in os.environ)
        or any(path.is_file() for path in files)
    )


def _configured(
    options: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[LaunchSpec, Mapping[str, Any]]:
    """The spec, and the fields that a file, a variable or a flag set."""
    settings = importlib.import_module("fxtrain.launch.config").resolve(
        file=options["config"],
        profile=options["profile"],
        env=os.environ,
        # The record takes a list where a file has one.
        flags={
            f"launch.{name}": (list(value) if isinstance(value, tuple) else value, "flag")
            for name, value in flags.items()
        },
    )
    spec = settings.launch
    if settings.values.plan:  # for fx.given_plan() in the script
        spec = attrs.evolve(spec, env=(*spec.env, plan_variable(settings.plan)))
    return spec, settings.values.launch


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise LaunchError(f"-o {word}: an option of a launcher is given as -o NAME=VALUE.")
    return name, value


def _plain(options: Any) -> Mapping[str, Any]:
    return options if isinstance(options, Mapping) else {}


def _files(ctx: click.Context, parameter: click.Parameter, start: str) -> list[CompletionItem]:
    return [CompletionItem(start, type="file")]


def _option(flag: Flag) -> click.Option:
    names = ["-n", flag.flag] if flag.field == "ranks" else [flag.flag]
    kinds = {field.name: field.type for field in attrs.fields(LaunchSpec)}
    number = {int: int, float: float, int | None: int}.get(kinds[flag.field])
    if not flag.metavar:
        return click.Option([*names, flag.field], is_flag=True, help=flag.help)
    choices = list(LAUNCHERS) if flag.field == "launcher" else []
    return click.Option(
        [*names, flag.field],
        type=number or str,
        multiple=flag.many == "again",
        metavar=flag.metavar,
        help=flag.help + (f": {', '.join(choices)}" if choices else ""),
    )


LAUNCH = click.Command(
    "launch",
    callback=_launch,
    help="Run a program on ranks of this machine, of several, or of a cluster.",
    options_metavar="[OPTIONS]",
    # All that follows the program is its own, whatever it looks like.
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
    params=[
        click.Option(["--config", "-c"], default="", metavar="FILE", help="the launch file"),
        click.Option(
            ["--profile", "-p"], default="", metavar="NAME", help="a setup of the launch file"
        ),
        *map(_option, FLAGS),
        click.Option(
            ["-o", "--option", "option"], multiple=True, metavar="NAME=VALUE",
            help="an option that only this launcher has",
        ),
        *(
            click.Option([f"--{name}"], default="", metavar=metavar, help=words)
            for name, (metavar, words) in _SHORT.items()
        ),
        click.Option(["--dry"], is_flag=True, help="show what would be started, and stop"),
        click.Option(["--json", "json_"], is_flag=True, help="with --dry: as JSON"),
        click.Argument(
            ["program"], nargs=-1, type=click.UNPROCESSED, shell_complete=_files,
            metavar="(SCRIPT | -m MODULE) [ARGS ...]",
        ),
    ],
)  # fmt: skip
