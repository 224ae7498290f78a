"""`fxtrain config` and its subcommands."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._optional import optional
from fxtrain._reading import read_text, write_file
from fxtrain._record import shown
from fxtrain.cli.config.prompts import choose_prompt, interview
from fxtrain.cli.output import Exit, as_json, print_json, print_table, say, warn
from fxtrain.diagnosis.setups import section_problems
from fxtrain.errors import PlanError
from fxtrain.interop.accelerate_config import convert_accelerate
from fxtrain.launchers.config.defaults import Machine, detect_machine, suggested
from fxtrain.launchers.config.launch_file import (
    LaunchFile,
    Section,
    parse,
    problems_of,
    read_launch_file,
)
from fxtrain.launchers.config.rendering import render, render_profile
from fxtrain.launchers.config.resolution import HERE, find_file, from_flags, resolve
from fxtrain.state.files import format_of, read_data

_NOTED = 80  # characters of a value
_path = click.Path(dir_okay=False)
_file = click.option("--config", "-c", "file", default="", type=_path, help="the launch file")
_force = click.option("--force", is_flag=True, help="replace an existing file")


@click.group("config", invoke_without_command=True)
@click.option("--config", "-c", "path", default=HERE[0], type=_path, help="the file to write")
@click.option("--profile", "-p", default="", help="add a profile with this name to it")
@_force
@click.pass_context
def CONFIG(ctx: click.Context, path: str, profile: str, force: bool) -> None:  # noqa: FBT001
    """Write, show, check and convert launch files.

    Without a command: ask a few questions and write a launch file.
    """
    if ctx.invoked_subcommand:
        return
    file = read_launch_file(path) if profile and Path(path).exists() else None
    if file is None:
        _check_new(path, force=force)
    elif profile in file.profiles and not force:
        raise PlanError(f"{path} already has a profile {profile!r}. Use --force to replace it.")
    machine = detect_machine()
    section = interview(machine, choose_prompt())
    if file is None:
        _write_new(path, _file_of(section, profile), notes=_head(machine))
    else:
        _write(path, _with_profile(path, file, profile, section))
        say(f"{path} has the profile {profile}: fxtrain launch --profile {profile} ...")


@CONFIG.command()
@click.argument("path", default=HERE[0], type=_path)
@click.option("--precision", default="", help="fp32, bf16, fp16 or fp8; by the machine if omitted")
@_force
def default(path: str, precision: str, force: bool) -> None:  # noqa: FBT001
    """Write a launch file without questions.

    It contains values for this machine, and all other fields as comments.
    """
    _check_new(path, force=force)
    machine = detect_machine()
    section = suggested(machine)
    if precision:
        section = attrs.evolve(section, plan={"precision": precision})
    if problems := problems_of(section):
        raise PlanError("\n".join(problems))
    _write_new(path, _file_of(section, ""), notes=_head(machine))


@CONFIG.command()
@_file
@click.option("--profile", "-p", default="", help="the profile")
@click.option("--set", "words", multiple=True, metavar="PATH=VALUE", help="such as launch.ranks=4")
@click.option("--said", is_flag=True, help="only values that are not defaults")
@as_json
def show(file: str, profile: str, words: tuple[str, ...], said: bool, json_: bool) -> None:  # noqa: FBT001
    """Show all values and their origins."""
    settings = resolve(file=file, profile=profile, env=os.environ, flags=from_flags(words))
    rows = [each for each in settings.every() if not said or each.origin != "default"]
    if json_:
        values = [attrs.asdict(row) for row in rows]
        print_json({"file": settings.file, "profile": settings.profile, "values": values})
        return
    place = settings.file or "none (all defaults)"
    say(f"launch file: {place}\nprofile: {settings.profile or 'none'}\n")
    print_table(
        ["value", "is", "from"], [[row.path, _shown(row.value), row.origin] for row in rows]
    )


@CONFIG.command()
@click.argument("path", default="", type=_path)
@as_json
def check(path: str, json_: bool) -> int:  # noqa: FBT001
    """Check that a launch file starts, and that its plan would be accepted.

    For each profile: its values, what `launch --dry` would refuse on this machine, and what
    `fx.wrap` would refuse on the ranks of the launch, except for names in your model. The exit
    code is 1 if there are errors.
    """
    path = path or find_file(os.environ) or HERE[0]
    if not os.path.exists(path):
        read_launch_file(path)  # raises, also with --json
    problems: list[str] = []
    profiles: list[str] = []
    try:
        file = read_launch_file(path)
        profiles = list(file.profiles)
        problems = _setup_problems(file)
    except PlanError as error:
        problems = [line for line in error.message.splitlines() if line != f"{path}:"]
    if json_:
        print_json({"file": path, "profiles": profiles, "problems": problems})
    else:
        good = f"{path} is valid. Profiles: {', '.join(profiles) or 'none'}."
        say("\n".join([f"{path}:", *problems]) if problems else good)
    return Exit.FOUND if problems else Exit.WELL


@CONFIG.command()
@click.argument("path", default="", type=_path)
def update(path: str) -> None:
    """Rewrite a launch file with the fields and comments of this version.

    It keeps all values, profiles and the comment at the top, and shows the other fields with
    their defaults. Other comments are replaced. A file with errors is not changed.
    """
    path = path or find_file(os.environ) or HERE[0]
    text = render(read_launch_file(path), format_of(path))
    lines = read_text(path).splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    while head and head[-1] in text.splitlines()[:1]:  # the comment of the first value
        head.pop()
    _write(path, "\n".join([*head, "", text]) if head else text)
    say(f"Updated {path}. Show all values with `fxtrain config show`.")


def _setup_problems(file: LaunchFile) -> list[str]:
    """What a launch with each profile would meet; without any only if the file has no default."""
    problems: list[str] = []
    for name in [*([] if file.default else [""]), *file.profiles]:
        at = f"profiles.{name}." if name else ""
        problems += [f"{at}{line}" for line in section_problems(file.section(name))]
    return problems


@CONFIG.command()
@click.argument("source", default="", type=_path)
@click.argument("path", default=HERE[0], type=_path)
@click.option("--profile", "-p", default="", help="write it as a profile with this name")
@click.option("--brief", is_flag=True, help="write the converted values without comments")
@_force
@as_json
def convert(
    source: str,
    path: str,
    profile: str,
    brief: bool,  # noqa: FBT001
    force: bool,  # noqa: FBT001
    json_: bool,  # noqa: FBT001
) -> None:
    """Turn an Accelerate config into a launch file.

    SOURCE is a YAML or JSON file of `accelerate config`; by default the last one it wrote.
    Settings without a counterpart are printed, and noted at the top of the new file.
    With --brief the file has the converted values only.
    """
    source = source or _accelerates_own(os.environ)
    data = read_data(source)
    try:
        converted = convert_accelerate(data)
    except PlanError as error:
        raise PlanError(f"{source}:\n{error}") from None
    notes = [f"{note.key} = {_quoted_value(note.value)}: {note.text}." for note in converted.notes]
    section = converted.section
    if json_:
        listed = [attrs.asdict(note) for note in converted.notes]
        print_json({**attrs.asdict(section), "notes": listed})
        return
    changed = " Changed or without a counterpart:" if notes else ""
    head = [f"Converted from {source}.{changed}", *notes]
    _check_new(path, force=force)
    _write_new(path, _file_of(section, profile), notes=head, brief=brief)
    for note in (*notes, *section_problems(section)):
        warn(note)


def _file_of(section: Section, profile: str) -> LaunchFile:
    if profile:
        return LaunchFile(profiles={profile: section})
    return LaunchFile(launch=section.launch, plan=section.plan)


def _with_profile(path: str, file: LaunchFile, name: str, section: Section) -> str:
    """The text of a launch file with another profile; comments in TOML are kept."""
    if (form := format_of(path)) != "toml":
        return render(attrs.evolve(file, profiles={**file.profiles, name: section}), form)
    tomlkit = optional("tomlkit", extra="files", needed_by="adding a profile")
    document = tomlkit.parse(read_text(path))
    if name in file.profiles:
        del document["profiles"][name]
    text = f"{tomlkit.dumps(document).rstrip()}\n\n{render_profile(name, section)}"
    parse(text, "toml")
    return text


def _check_new(path: str, *, force: bool) -> None:
    """Refuse to write a launch file of an unknown format, or one that exists, without `force`."""
    format_of(path)
    if Path(path).exists() and not force:
        raise PlanError(
            f"{path} already exists. Choose another name, add a --profile, or use --force to "
            f"replace it."
        )


def _write_new(path: str, file: LaunchFile, *, notes: list[str], brief: bool = False) -> None:
    _write(path, render(file, format_of(path), notes=notes, brief=brief))
    say(f"Wrote {path}. Show all values with `fxtrain config show`.")


def _write(path: str, text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error}.") from error


def _accelerates_own(env: Mapping[str, str]) -> str:
    """Where `accelerate config` writes its file."""
    cache = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~"), ".cache"))
    home = Path(env.get("HF_HOME") or Path(cache, "huggingface"), "accelerate")
    return str(home / "default_config.yaml")


def _head(machine: Machine) -> list[str]:
    return [
        f"Written by fxtrain config on {machine.summary}.",
        "Commented-out lines show defaults. profiles.NAME.launch and profiles.NAME.plan change "
        "values for one setup, chosen with --profile NAME.",
    ]


def _quoted_value(value: Any) -> str:
    """A value in a note; text without quotes, as written in the file."""
    return value if isinstance(value, str) and len(value) < _NOTED else shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) or value is None:
        return "" if not value else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
