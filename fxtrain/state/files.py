"""Records as JSON, TOML or YAML text, and plans as files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from fxtrain._optional import optional
from fxtrain._reading import path_problem, read_text, write_file
from fxtrain.errors import PlanError
from fxtrain.state.converters import plain, structure, unstructure
from fxtrain.state.parsing import Format, from_environment, merge_tables, parse_text, put
from fxtrain.state.plan import Plan

PLAN_VARIABLE = "FXTRAIN_PLAN"  # with which `fxtrain launch` passes a plan to the ranks

T = TypeVar("T")
_SUFFIXES: dict[str, Format] = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def dumps(record: object, format: Format = "json") -> str:
    """A record as text.

    TOML has no null, so fields that are None are omitted there; their default is None.

    Raises:
        PlanError: the record contains a value that files do not support.
        MissingPackageError: TOML needs tomlkit and YAML pyyaml (the extra `files`).

    Example:
        >>> import fxtrain as fx
        >>> text = fx.state.dumps(fx.Plan(accumulate=2), "toml")
        >>> fx.state.loads(text, fx.Plan, "toml").accumulate
        2
    """
    return text_of(plain(record), format)


def text_of(data: Mapping[str, Any], format: Format) -> str:
    """Plain data as text. In TOML, which has no null, values that are None are omitted."""
    needed_by = f"text in {format.upper()}"
    if format == "json":
        return json.dumps(data, indent=2) + "\n"
    if format == "toml":
        return optional("tomlkit", extra="files", needed_by=needed_by).dumps(_without_none(data))
    yaml = optional("yaml", extra="files", needed_by=needed_by)
    return yaml.safe_dump(data, sort_keys=False)


def loads(text: str, cls: type[T] = Plan, format: Format = "json") -> T:
    """A record from text.

    Raises:
        PlanError: the text is invalid in that format, or does not describe the record; one line
            per problem.

    Example:
        >>> import fxtrain as fx
        >>> fx.state.loads('{"accumulat": 2}')
        Traceback (most recent call last):
        fxtrain.errors.PlanError: plan: unknown key 'accumulat' (did you mean 'accumulate'?); ...
    """
    return structure(parse_text(text, format), cls)


def read_record(path: str | Path, cls: type[T] = Plan) -> T:
    """A record, by default a plan, from a .json, .toml, .yaml or .yml file.

    Raises:
        PlanError: the suffix is another one, the file does not exist, or it is no such record.
    """
    data = read_data(path)
    try:
        return structure(data, cls)
    except PlanError as error:
        raise PlanError(f"{path}:\n{error}") from None


def read_data(path: str | Path) -> Any:
    """Plain data from a .json, .toml, .yaml or .yml file; a PlanError if it is invalid."""
    form = format_of(path)
    try:
        return parse_text(read_text(path), form)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error}.", code="FX201") from error
    except PlanError as error:
        raise PlanError(f"{path}:\n{error}") from None


def write_record(record: object, path: str | Path) -> None:
    """Write a record, such as a plan, to a .json, .toml, .yaml or .yml file.

    Effects:
        Writes the file.

    Raises:
        PlanError: the suffix is another one, or the file cannot be written.
    """
    text = dumps(record, format_of(path))
    try:
        write_file(path, text)
    except (OSError, UnicodeError) as error:
        raise PlanError(f"{path} cannot be written: {error}.", code="FX201") from error


read_plan, write_plan = read_record, write_record


def format_of(path: str | Path) -> Format:
    """The format of a file by its suffix; a PlanError for another one."""
    if problem := path_problem(path):
        raise PlanError(f"The path of a file: {problem}.")
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise PlanError(
            f"{str(path)!r}: choose a name that ends in {', '.join(_SUFFIXES)}.", code="FX201"
        )
    return _SUFFIXES[suffix]


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    return data


def given_values(env: Mapping[str, str]) -> dict[str, Any]:
    """The values that the launch sets: in FXTRAIN_PLAN, or in variables such as FXTRAIN_PLAN__SEED.

    They are plain data; a PlanError if no plan has such values. `fxtrain launch` merges the latter
    into the former, so they count only where it is not set: under other launchers.
    """
    values: dict[str, Any] = {}
    if PLAN_VARIABLE in env:
        names = f"The variable {PLAN_VARIABLE}, set by fxtrain launch"
    else:
        listed = ", ".join(name for name in env if name.startswith(f"{PLAN_VARIABLE}__"))
        names = f"The variables {listed}"
    try:
        if PLAN_VARIABLE in env:
            values = json.loads(env[PLAN_VARIABLE])  # also infinity, which a flag may be
        else:
            for path, value in from_environment(env).items():
                if path.startswith("plan."):
                    values = merge_tables(values, put({}, path.removeprefix("plan."), value))
        structure(values, Plan)
    except (PlanError, ValueError, RecursionError) as error:
        raise PlanError(f"{names}:\n{error}") from None
    return values


def plan_with(values: Mapping[str, Any], plan: Plan) -> Plan:
    """The plan with these values, as plain data; the fields that they do not set stay as they are.

    Tables are merged as those of a launch file are.
    """
    below = unstructure(plan)
    data = merge_tables({name: below[name] for name in values}, values)
    after = structure(data, Plan)
    return attrs.evolve(plan, **{name: getattr(after, name) for name in data})
