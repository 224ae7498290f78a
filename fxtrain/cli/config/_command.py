"""`fxtrain config` and its parts."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._errors import PlanError
from fxtrain.cli._exit import Exit
from fxtrain.cli._report import as_json, print_json, print_table, warn
from fxtrain.cli.config._accelerate import convert_accelerate
from fxtrain.cli.config._file import FORMATS, LaunchFile, read_data, read_launch_file
from fxtrain.cli.config._machine import Machine, look, suggested
from fxtrain.cli.config._resolve import HERE, find_file, from_flags, resolve
from fxtrain.cli.config._write import render

__all__ = ["CONFIG", "write_new"]

_path = click.Path(dir_okay=False)
_file = click.option("--config", "-c", "file", default="", type=_path, help="the launch file")
_force = click.option("--force", is_flag=True, help="replace what is there")


@click.group("config")
def CONFIG() -> None:
    """Write, show, check and convert launch files."""


@CONFIG.command()
@click.argument("path", default=HERE[0], type=_path)
@_force
def default(path: str, force: bool) -> None:  # noqa: FBT001
    """Write a launch file without questions.

    It holds what suits this machine, and all else as comments.
    """
    machine = look()
    write_new(path, LaunchFile(common=suggested(machine)), notes=_head(machine), force=force)


@CONFIG.command()
@_file
@click.option("--profile", "-p", default="", help="the profile")
@click.option("--set", "words", multiple=True, metavar="PATH=VALUE", help="as launch.ranks=4")
@click.option("--said", is_flag=True, help="only values that are not defaults")
@as_json
def show(file: str, profile: str, words: tuple[str, ...], said: bool, json_: bool) -> None:  # noqa: FBT001
    """Show what counts, and where it comes from."""
    settings = resolve(file=file, profile=profile, env=os.environ, flags=from_flags(words))
    rows = [each for each in settings.every() if not said or each.origin != "default"]
    if json_:
        values = [attrs.asdict(row) for row in rows]
        print_json({"file": settings.file, "profile": settings.profile, "values": values})
        return
    place = settings.file or "none (the defaults count)"
    click.echo(f"launch file: {place}\nprofile: {settings.profile or 'none'}\n")
    print_table(
        ["value", "is", "from"], [[row.path, _shown(row.value), row.origin] for row in rows]
    )


@CONFIG.command()
@click.argument("path", default="", type=_path)
@as_json
def check(path: str, json_: bool) -> int:  # noqa: FBT001
    """Check a launch file and its profiles.

    The exit code is 1 if it holds mistakes.
    """
    found = path or find_file(os.environ)
    if not found or not Path(found).is_file():
        what = found or "fxtrain.toml, fxtrain.yaml and the user's own"
        raise PlanError(f"{what}: there is no such launch file. `fxtrain config` writes one.")
    problems: list[str] = []
    profiles: list[str] = []
    try:
        profiles = list(read_launch_file(found).profiles)
    except PlanError as error:
        problems = [line for line in str(error).splitlines() if line != f"{found}:"]
    if json_:
        print_json({"file": found, "profiles": profiles, "problems": problems})
    else:
        good = f"{found} is in order. Profiles: {', '.join(profiles) or 'none'}."
        click.echo("\n".join([f"{found}:", *problems]) if problems else good)
    return Exit.FOUND if problems else Exit.WELL


@CONFIG.command()
@click.argument("source", default="", type=_path)
@click.argument("path", default=HERE[0], type=_path)
@click.option("--profile", "-p", default="", help="make it a profile of that name")
@_force
@as_json
def convert(source: str, path: str, profile: str, force: bool, json_: bool) -> None:  # noqa: FBT001
    """Turn an Accelerate config into a launch file.

    SOURCE is a YAML or JSON file of `accelerate config`; by default the one that it wrote last.
    What has no counterpart is told, and noted at the head of the new file.
    """
    source = source or _accelerates_own(os.environ)
    try:
        converted = convert_accelerate(read_data(source, "yaml"))
    except PlanError as error:
        raise PlanError(f"{source}:\n{error}") from None
    notes = [f"{note.key} = {note.value}: {note.text}." for note in converted.notes]
    section = converted.section
    file = LaunchFile(profiles={profile: section}) if profile else LaunchFile(common=section)
    if json_:
        print_json(
            {**attrs.asdict(section), "notes": [attrs.asdict(one) for one in converted.notes]}
        )
        return
    head = (
        [f"Converted from {source}. Not carried over as it was:", *notes]
        if notes
        else [f"Converted from {source}."]
    )
    write_new(path, file, notes=head, force=force)
    for note in notes:
        warn(note)


def _accelerates_own(env: Mapping[str, str]) -> str:
    """Where `accelerate config` writes."""
    cache = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME", "~"), ".cache"))
    home = Path(env.get("HF_HOME") or Path(cache, "huggingface"), "accelerate")
    return str(home / "default_config.yaml")


def write_new(path: str, file: LaunchFile, *, notes: list[str], force: bool) -> None:
    """Write a launch file and say so.

    Raises:
        PlanError: the suffix is another one, or there is a file and `force` is not given.
    """
    form = FORMATS.get(Path(path).suffix.lower())
    if form is None:
        raise PlanError(f"{path}: a launch file ends in {', '.join(FORMATS)}.")
    if Path(path).exists() and not force:
        raise PlanError(f"{path} is there already. Give another name, or --force to replace it.")
    text = render(file, form, notes=notes)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error}.") from error
    click.echo(f"Wrote {path}. `fxtrain config show` tells what counts.")


def _head(machine: Machine) -> list[str]:
    return [
        f"Written by fxtrain config on {machine.summary}.",
        "What is commented out shows the default; profiles.NAME.launch and profiles.NAME.plan "
        "change values for one setup, chosen with --profile NAME.",
    ]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) or value is None:
        return "" if not value else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
