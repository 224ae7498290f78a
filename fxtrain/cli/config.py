"""`fxtrain config`: its subcommands."""

import itertools
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fxtrain import _extensions
from fxtrain._reading import read_text, write_file
from fxtrain._record import shown
from fxtrain.cli.output import Exit, FilePath, as_json, json_asked, print_text, report, warn
from fxtrain.cli.tables import print_table
from fxtrain.errors import PlanError
from fxtrain.launchers.config import (
    HERE,
    find_file,
    from_flags,
    launch_config,
    read_launch_file,
    render,
    resolve,
)
from fxtrain.state.files import format_of, read_data

if TYPE_CHECKING:
    from fxtrain._extensions import MachineFacts

_NOTED = 80  # characters of a value
_path = FilePath()
_file = click.option("--config", "-c", "file", default="", type=_path, help="the launch file")
_force = click.option("--force", is_flag=True, help="replace an existing file")


@click.group("config", invoke_without_command=True)
@click.option("--config", "-c", "path", default=HERE[0], type=_path, help="the file to write")
@_force
@click.pass_context
def CONFIG(ctx: click.Context, path: str, force: bool) -> None:  # noqa: FBT001
    """Write, show, check and convert launch files.

    Without a command: ask a few questions and write a launch file.
    """
    if ctx.invoked_subcommand:
        return
    _check_new(path, force=force)
    machine = _extensions.detect_machine()
    _write_new(path, _extensions.interview(machine, _extensions.prompt), notes=_head(machine))


@CONFIG.command()
@click.argument("path", default=HERE[0], type=_path)
@click.option("--precision", default="", help="fp32, bf16, fp16 or fp8; by the machine if omitted")
@_force
def default(path: str, precision: str, force: bool) -> None:  # noqa: FBT001
    """Write a launch file without questions.

    It contains values for this machine, and all other fields as comments.
    """
    _check_new(path, force=force)
    machine = _extensions.detect_machine()
    precision = precision or ("bf16" if machine.bf16 else "")
    plan = {"precision": precision} if precision else {}
    values = {"launch": {"ranks": max(1, machine.count)}, "plan": plan}
    launch_config(values)
    _write_new(path, values, notes=_head(machine))


@CONFIG.command("show")
@_file
@click.option("--set", "words", multiple=True, metavar="PATH=VALUE", help="such as launch.ranks=4")
@click.option("--said", is_flag=True, help="only values that are set, without defaults")
@as_json
def show_values(file: str, words: tuple[str, ...], said: bool) -> None:  # noqa: FBT001
    """Show all values, as the launch file, variables and flags set them."""
    config = resolve(file=file, env=os.environ, flags=from_flags(words))
    values = config.by_path(set_only=said)
    rows = [[path, _shown(value)] for path, value in values.items()]

    def display() -> None:
        print_text(f"launch file: {config.file or 'none (all defaults)'}\n")
        print_table(["value", "is"], rows)

    report({"file": config.file, "values": values}, display)


@CONFIG.command("check")
@click.argument("path", default="", type=_path)
@as_json
def check_file(path: str) -> int:
    """Check that a launch file starts, and that its plan would be accepted.

    Checks its values, what `launch --dry` would refuse on this machine, and what `fx.wrap` would
    refuse on the ranks of the launch, except for names in your model. The exit code is 1 if there
    are errors.
    """

    path = path or find_file(os.environ) or HERE[0]
    if not os.path.exists(path):
        read_launch_file(path)  # raises, also with --json
    try:
        problems = list(_extensions.launch_file_problems(read_launch_file(path)))
    except PlanError as error:
        problems = [line for line in error.message.splitlines() if line != f"{path}:"]
    text = "\n".join([f"{path}:", *problems]) if problems else f"{path} is valid."
    report({"file": path, "problems": problems}, text)
    return Exit.FOUND if problems else Exit.WELL


@CONFIG.command("update")
@click.argument("path", default="", type=_path)
def rewrite(path: str) -> None:
    """Rewrite a launch file with the fields and comments of this version.

    It keeps all values and the comment at the top, and shows the other fields with their
    defaults. Other comments are replaced. A file with errors is not changed.
    """
    path = path or find_file(os.environ) or HERE[0]
    text = render(read_launch_file(path).values, format_of(path))
    lines = read_text(path).splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    write_file(path, "\n".join([*head, "", text]) if head else text)
    print_text(f"Updated {path}. Show all values with `fxtrain config show`.")


@CONFIG.command()
@click.argument("source", default="", type=_path)
@click.argument("path", default=HERE[0], type=_path)
@click.option("--brief", is_flag=True, help="write the converted values without comments")
@_force
@as_json
def convert(source: str, path: str, brief: bool, force: bool) -> None:  # noqa: FBT001
    """Turn an Accelerate config into a launch file.

    SOURCE is a YAML or JSON file of `accelerate config`; by default the last one it wrote.
    Settings without a counterpart are printed, and noted at the top of the new file.
    With --brief the file has the converted values only.
    """

    if not source:  # where `accelerate config` writes its file
        cache = os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "~"), ".cache")
        home = Path(os.environ.get("HF_HOME") or Path(cache, "huggingface"))
        source = str(home / "accelerate" / "default_config.yaml")
        if not Path(source).exists():
            raise PlanError(
                f"`accelerate config` has written no {source}. Name the file to convert: "
                f"fxtrain config convert OLD.yaml."
            )
    data = read_data(source)
    try:
        values, noted = _extensions.convert_accelerate(data)
    except PlanError as error:
        raise PlanError(f"{source}:\n{error}") from None
    notes = [f"{key} = {_quoted_value(value)}: {text}." for key, value, text in noted]
    if json_asked():
        listed = [
            {"key": k, "value": _plain_value(value), "text": text} for k, value, text in noted
        ]
        report({**values, "notes": listed}, "")
        return
    changed = " Changed or without a counterpart:" if notes else ""
    head = [f"Converted from {source}.{changed}", *notes]
    _check_new(path, force=force)
    _write_new(path, values, notes=head, brief=brief)
    for note in (*notes, *_extensions.launch_file_problems(launch_config(values))):
        warn(note)


def _check_new(path: str, *, force: bool) -> None:
    """Refuse to write a launch file of an unknown format, or one that exists, without `force`."""
    format_of(path)
    if Path(path).exists() and not force:
        raise PlanError(
            f"{path} already exists. Choose another name, or use --force to replace it."
        )


def _write_new(
    path: str, values: Mapping[str, Any], *, notes: list[str], brief: bool = False
) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_file(path, render(values, format_of(path), notes=notes, brief=brief))
    named = "" if path in HERE else f" --config {shlex.quote(path)}"  # those are found without
    print_text(
        f"Wrote {path}. Use it with `fxtrain launch{named} train.py`. Show all values with "
        f"`fxtrain config show{named}`."
    )


def _plain_value(value: Any) -> Any:
    """A value in a note, for JSON; one that JSON does not have, such as a date of YAML, as text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return _quoted_value(value)
    return value


def _quoted_value(value: Any) -> str:
    """A value in a note; text without quotes, as written in the file."""
    return value if isinstance(value, str) and len(value) < _NOTED else shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) or value is None:
        return "" if not value else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _head(machine: "MachineFacts") -> list[str]:
    devices = f"{machine.count} {machine.kind} devices" if machine.count else "no accelerator"
    return [
        f"Written by fxtrain config on a machine with {devices} and {machine.cores} cores.",
        "Commented-out lines show defaults.",
    ]
