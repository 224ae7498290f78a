"""Records as JSON, TOML or YAML text, and plans as files."""

import json
import re
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from fxtrain._errors import PlanError
from fxtrain._optional import optional
from fxtrain._paths import path_problem
from fxtrain.state._convert import plain, structure
from fxtrain.state._plan import Plan
from fxtrain.state._record import shown

__all__ = ["dumps", "loads", "read_plan", "unique_keys", "write_plan"]

T = TypeVar("T")
Format = Literal["json", "toml", "yaml"]
_SUFFIXES: dict[str, Format] = {
    ".json": "json",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
}


def dumps(record: Any, format: Format = "json") -> str:
    """A record as text.

    TOML has no null, so fields that are None are left out there; each has None as default.

    Raises:
        PlanError: the record holds something that no file could.
        MissingPackageError: TOML needs tomlkit and YAML pyyaml (the extra `files`).

    Example:
        >>> import fxtrain as fx
        >>> fx.loads(fx.dumps(fx.Plan(accumulate=2), "toml"), fx.Plan, "toml").accumulate
        2
    """
    data = plain(record)
    if format == "json":
        return json.dumps(data, indent=2) + "\n"
    needed_by = f"dumps(format={format!r})"
    if format == "toml":
        return optional("tomlkit", extra="files", needed_by=needed_by).dumps(_without_none(data))
    if format == "yaml":
        yaml = optional("yaml", extra="files", needed_by=needed_by)
        return yaml.safe_dump(data, sort_keys=False)
    raise PlanError(f"format={format!r}: choose one of json, toml, yaml.")


def loads(text: str, cls: type[T] = Plan, format: Format = "json") -> T:
    """A record from text.

    Raises:
        PlanError: the text is not of that format, or does not describe the record; one line
            per problem.

    Example:
        >>> import fxtrain as fx
        >>> fx.loads('{"accumulat": 2}')
        Traceback (most recent call last):
        fxtrain._errors.PlanError: plan: unknown key 'accumulat' (did you mean 'accumulate'?); ...
    """
    return structure(_parse(text, format), cls, _third_party())


def read_plan(path: str | Path) -> Plan:
    """A plan from a .json, .toml, .yaml or .yml file.

    Raises:
        PlanError: the suffix is another one, the file is not there, or it is no plan.
    """
    form = _format_of(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"read_plan({str(path)!r}): {error}.") from error
    try:
        return loads(text, Plan, form)
    except PlanError as error:
        raise PlanError(f"{path}:\n{error}") from None


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a .json, .toml, .yaml or .yml file.

    Effects:
        Writes the file.

    Raises:
        PlanError: the suffix is another one, or the file cannot be written.
    """
    text = dumps(plan, _format_of(path))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"write_plan({str(path)!r}): {error}.") from error


def _format_of(path: str | Path) -> Format:
    if problem := path_problem(path):
        raise PlanError(f"The path of a plan: {problem}.")
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise PlanError(f"{str(path)!r}: a plan file ends in {', '.join(_SUFFIXES)}.")
    return _SUFFIXES[suffix]


def _parse(text: str, format: Format) -> Any:
    if format not in _FORMATS:
        raise PlanError(f"format={format!r}: choose one of {', '.join(_FORMATS)}.")
    try:
        return _FORMATS[format](text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"This is not {format.upper()}: {error}") from None


def _from_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=unique_keys)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as `json.loads(object_pairs_hook=...)` takes it; each key once.

    Raises:
        ValueError: a key is there twice.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} appears twice in one table.")
    return table


def _from_yaml(text: str) -> Any:
    yaml: Any = optional("yaml", extra="files", needed_by="loads(format='yaml')")
    try:
        return yaml.load(text, Loader=_strict_loader(yaml))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (LookupError, AttributeError, TypeError) as error:
        raise ValueError(f"a value does not fit its tag, such as !!int ({error}).") from error


def _strict_loader(yaml: Any) -> Any:
    """A loader of plain data that guesses less than YAML 1.1: `yes` and `010` are text.

    What pyyaml writes is read back as it was, since it quotes all text that it could mistake.
    """

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
            keys = [(key.tag, key.value) for key, _ in node.value if key.id == "scalar"]
            if len(set(keys)) < len(keys):
                twice = next(key[1] for key in keys if keys.count(key) > 1)
                raise ValueError(f"the key {shown(twice)} appears twice in one table.")
            return super().construct_mapping(node, deep)

    for tag, pattern, first in _YAML:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))
    return Loader


_FORMATS: dict[str, Callable[[str], Any]] = {
    "json": _from_json,
    "toml": tomllib.loads,
    "yaml": _from_yaml,
}
_YAML = (
    ("bool", r"^(?:true|false)$", "tf"),
    ("float", r"^[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.inf)$|^\.nan$", "-+.0123456789"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    ("merge", r"^<<$", "<"),
    ("null", r"^(?:null|~|)$", ["n", "~", ""]),
)


def _third_party() -> tuple[type, ...]:
    return tuple(entry.load().config for entry in entry_points(group="fxtrain.strategies"))


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    return data
