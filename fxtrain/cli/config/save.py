"""Launch files on disk: creates one, or adds a profile to an existing one."""

import itertools
from pathlib import Path

import attrs

from fxtrain._errors import PlanError
from fxtrain._optional import optional
from fxtrain._reading import read_text, write_file
from fxtrain.cli.output import say
from fxtrain.launch.config.launch_file import FORMATS, LaunchFile, Section, parse, read_launch_file
from fxtrain.launch.config.rendering import render
from fxtrain.state import Format

__all__ = ["check_profile", "rewrite", "write_new", "write_profile"]


def write_new(
    path: str, file: LaunchFile, *, notes: list[str], force: bool, brief: bool = False
) -> None:
    """Write a launch file and report it.

    Args:
        path: The file.
        file: Its content.
        notes: Sentences for the top of the file.
        force: Replace an existing file.
        brief: Leave out all comments.

    Raises:
        PlanError: the suffix is unknown, or the file exists and `force` is not given.
    """
    form = _form(path)
    if Path(path).exists() and not force:
        raise PlanError(
            f"{path} already exists. Choose another name, or use --force to replace it."
        )
    _write(path, render(file, form, notes=notes, brief=brief))
    say(f"Wrote {path}. Show all values with `fxtrain config show`.")


def rewrite(path: str) -> None:
    """Write a launch file again with the current comments and offers, and report it.

    Values, profiles and the comment at the top are kept; other comments are replaced.

    Raises:
        PlanError: the file cannot be read; it is left as it is.
    """
    form = _form(path)
    file = read_launch_file(path)
    lines = read_text(path).splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    text = render(file, form)
    while head and head[-1] in text.splitlines()[:1]:  # the comment of the first value
        head.pop()
    _write(path, "\n".join([*head, "", text]) if head else text)
    say(f"Updated {path}. Show all values with `fxtrain config show`.")


def check_profile(path: str, name: str, *, force: bool) -> None:
    """Check that a profile can be added, before asking questions.

    Raises:
        PlanError: the file is invalid, or has the profile and `force` is not given.
    """
    _form(path)
    if name in read_launch_file(path).profiles and not force:
        raise PlanError(f"{path} already has a profile {name!r}. Use --force to replace it.")


def write_profile(path: str, name: str, section: Section) -> None:
    """Add a profile to a launch file, or replace it, and report it.

    Comments in TOML are kept; a YAML file is rewritten.
    """
    form = _form(path)
    file = read_launch_file(path)
    profiles = {**file.profiles, name: section}
    if form == "yaml":
        text = render(attrs.evolve(file, profiles=profiles), form)
    else:
        text = _without(path, name).rstrip() + "\n\n"
        text += render(LaunchFile(profiles={name: section}), form, offers=False)
        parse(text, form)
    _write(path, text)
    say(f"{path} has the profile {name}: fxtrain launch --profile {name} ...")


def _without(path: str, name: str) -> str:
    """The text of a TOML file without one profile."""
    tomlkit = optional("tomlkit", extra="files", needed_by="adding a profile")
    document = tomlkit.parse(read_text(path))
    if name in document.get("profiles", {}):
        del document["profiles"][name]
    return tomlkit.dumps(document)


def _form(path: str) -> Format:
    form = FORMATS.get(Path(path).suffix.lower())
    if form is None:
        raise PlanError(f"{path}: the name of a launch file ends in {', '.join(FORMATS)}.")
    return form


def _write(path: str, text: str) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error}.") from error
