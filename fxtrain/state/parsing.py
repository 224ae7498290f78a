"""From text to plain data: strict readers of JSON, TOML and YAML, and tables that are merged."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

from fxtrain._optional import optional
from fxtrain._record import closest, shown
from fxtrain.errors import PlanError
from fxtrain.state.mesh import read_mesh

Format = Literal["json", "toml", "yaml"]
_MAX_REASON_LENGTH = 500  # characters of a parser's message
_MAX_YAML = 1 << 20  # characters: pyyaml takes seconds for that many
_MAX_DEPTH = 100  # tables and lists of YAML inside each other
# Fields with a short form, and the key for which it stands in their table.
_SHORT_FORMS = {"strategy": "kind", "quantize": "kind", "precision": "compute"}


def parse_text(text: str, format: Format) -> Any:
    """Plain data from the text of a settings file; a PlanError if it is invalid in that format."""
    if format not in _FORMATS:
        raise PlanError(f"format={format!r}: choose one of {', '.join(_FORMATS)}.", code="FX201")
    try:
        return _FORMATS[format](text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise PlanError(
            f"Invalid {format.upper()}: {reason[:_MAX_REASON_LENGTH]}", code="FX201"
        ) from None


def parse_json(text: str | bytes) -> Any:
    """Plain data from JSON that every parser reads alike; else a ValueError.

    Each key appears once in its table, numbers are finite, and text can be encoded as UTF-8.
    """
    text = text if isinstance(text, str) else text.decode()
    try:
        data = json.loads(
            text, object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_no_number
        )
        if "\\ud" in text or "\\uD" in text:  # may be half a surrogate pair
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return data


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `json.loads(object_pairs_hook=...)`, unless a key appears twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} appears twice in one table.")
    return table


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word[:80]} is not a finite number.")
    return value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number.")


def parse_yaml(text: str) -> Any:
    """Data as pyyaml's `safe_load` reads it; aliases and input that is too large are refused."""
    yaml: Any = optional("yaml", extra="files", needed_by="A file in YAML")
    if len(text) > _MAX_YAML:
        raise ValueError(f"it has {len(text)} characters; YAML is limited to {_MAX_YAML}.")
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(
                    f"line {event.start_mark.line + 1}: aliases (*{event.anchor}) are not "
                    f"supported. Write the value out."
                )
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ValueError("it is nested too deeply")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # of !!bool x, say
        raise ValueError(f"a value does not fit its tag: {error}") from None


_FORMATS: dict[str, Callable[[str], Any]] = {
    "json": parse_json,
    "toml": tomllib.loads,
    "yaml": parse_yaml,
}


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables; where both have a value, `above` wins.

    Nested tables are merged key by key, unless their kinds differ: the options of one strategy do
    not apply to another. A short form below a table counts as the table for which it stands.

    Example:
        >>> from fxtrain.state.parsing import merge_tables
        >>> merge_tables({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}})
        {'a': {'x': 1, 'y': 3}, 'b': 2}
        >>> merge_tables({"strategy": "fsdp"}, {"strategy": {"shard": 4}})
        {'strategy': {'kind': 'fsdp', 'shard': 4}}
    """
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(value, Mapping):
            under = _table_of(key, under)
        merged[key] = value
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            # MPI's option `kind` chooses no record: its other options stay.
            together = key == "options" or value.get("kind", under.get("kind")) == under.get("kind")
            merged[key] = merge_tables(under, value) if together else value
    return merged


def _table_of(key: str, value: Any) -> Any:
    """The table for which a short form stands; any other value unchanged."""
    if key == "compile" and value is True:
        return {}
    if not isinstance(value, str):
        return value
    if key == "mesh":
        return {axis: size for axis, size in read_mesh(value).sizes.items() if size != 1}
    return {_SHORT_FORMS[key]: value} if key in _SHORT_FORMS else value


def put(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Data with a value at a dotted path.

    Example:
        >>> from fxtrain.state.parsing import put
        >>> put({"a": {"b": 1}}, "a.c", 2)
        {'a': {'b': 1, 'c': 2}}
    """
    head, _, rest = path.partition(".")
    if not rest:
        return {**data, head: value}
    under = data.get(head)
    return {**data, head: put(dict(under) if isinstance(under, Mapping) else {}, rest, value)}


def leaves(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not a table, with its dotted path; an empty table is a value."""
    if not isinstance(data, Mapping) or (prefix and not data):
        yield prefix, data
        return
    for key, value in data.items():
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def near(name: Any, known: tuple[str, ...] | list[str]) -> str:
    """A question about a similar name, or nothing."""
    close = closest(name, known).strip()
    return f" (d{close[1:]})" if close else ""


def from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    """Values by path from variables such as FXTRAIN_LAUNCH__RANKS=4.

    Two underscores separate the names of a path; a value is parsed as TOML, or is a string.

    Example:
        >>> from fxtrain.state.parsing import from_environment
        >>> from_environment({"FXTRAIN_PLAN__DATA__SOURCE": "dispatch"})
        {'plan.data.source': 'dispatch'}
    """
    values: dict[str, Any] = {}
    for name in sorted(env):
        first, *rest = name.split("__")
        if first in ("FXTRAIN_LAUNCH", "FXTRAIN_PLAN") and rest:
            path = ".".join([first.removeprefix("FXTRAIN_"), *rest]).lower()
            values[path] = value_of(env[name])
    return values


def value_of(text: str) -> Any:
    """The value of a text in TOML; any other text is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text
