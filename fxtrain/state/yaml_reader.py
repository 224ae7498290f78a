"""YAML as plain data: true, false, null, numbers, text, lists and tables, and nothing else.

pyyaml parses the text into nodes. Their values are constructed here, since its own constructors
create dates and sets, fail with arbitrary errors, and expand an alias as often as it appears:
300 bytes can become a list of a hundred million entries.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from fxtrain._optional import optional
from fxtrain._record import shown

__all__ = ["parse_yaml"]

_MAX_BYTES = 1 << 20  # characters: pyyaml takes seconds for that many
_ALIASED = 100_000  # values that aliases may add to a file
_TAGS = "tag:yaml.org,2002:"
# The core schema of YAML 1.2, with fewer guesses: `yes`, `010` and `1e3` are text. pyyaml's
# output is read back unchanged, since it quotes all ambiguous text.
_RESOLVED = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("float", r"^[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.inf)$|^\.nan$", "-+.0123456789"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", "-+0123456789"),
    ("merge", r"^<<$", "<"),
    ("null", r"^(?:null|Null|NULL|~|)$", ["n", "N", "~", ""]),
)
_BOOLS = {"true": True, "false": False}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: {"null": None, "~": None, "": None}[text.lower()],
    "bool": lambda text: _BOOLS[text.lower()],
    "int": int,
    "float": lambda text: float(re.sub(r"^([-+]?)\.(?=inf$|nan$)", r"\1", text.lower())),
    "str": lambda text: text.encode().decode(),  # half a surrogate pair is no text
}


def parse_yaml(text: str) -> Any:
    """Plain data from YAML.

    Raises:
        ValueError: it is invalid (with the line), or its aliases expand to too much.
        RecursionError: it is nested too deeply.
        MissingPackageError: pyyaml is not installed (the extra `files`).
    """
    yaml: Any = optional("yaml", extra="files", needed_by="A file in YAML")
    if len(text) > _MAX_BYTES:
        raise ValueError(f"it has {len(text)} characters; YAML is limited to {_MAX_BYTES}.")
    try:
        loader = _loader(yaml)(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        told = ". ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{_place(mark)}: {told}.") from None
    except (yaml.YAMLError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    if root is None:
        return None
    _check_size(root, _ALIASED + len(text))
    return _value(root, {})


def _loader(yaml: Any) -> Any:
    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    for tag, pattern, first in _RESOLVED:
        Loader.add_implicit_resolver(_TAGS + tag, re.compile(pattern), list(first))
    return Loader


def _check_size(root: Any, most: int) -> None:
    """Refuse a value that contains itself, or is far larger than its text with aliases expanded."""
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(node: Any) -> int:
        if id(node) in inside:
            raise ValueError(
                f"{_place(node.start_mark)}: a value contains itself through an alias."
            )
        if id(node) not in sizes:
            inside.add(id(node))
            sizes[id(node)] = 1 + sum(map(size, _children(node)))
            inside.remove(id(node))
        return sizes[id(node)]

    if (found := size(root)) > most:
        raise ValueError(
            f"its aliases expand to {shown(found)} values; the limit for this text is {most}."
        )


def _children(node: Any) -> Iterator[Any]:
    if node.id == "sequence":
        yield from node.value
    elif node.id == "mapping":
        for pair in node.value:
            yield from pair


def _value(node: Any, made: dict[int, Any]) -> Any:
    """The value of a node; an aliased node is constructed once."""
    if id(node) not in made:
        made[id(node)] = _make(node, made)
    return made[id(node)]


def _make(node: Any, made: dict[int, Any]) -> Any:
    tag = _short(node.tag).removeprefix("!!")
    if (node.id, tag) == ("sequence", "seq"):
        return [_value(one, made) for one in node.value]
    if (node.id, tag) == ("mapping", "map"):
        return _table(node, made)
    if node.id != "scalar" or (tag not in _SCALARS and tag != "merge"):
        raise ValueError(
            f"{_place(node.start_mark)}: the tag {shown(_short(node.tag))} of a {node.id} is not "
            f"supported. A file contains true, false, null, numbers, text, lists and tables."
        )
    try:
        return _SCALARS["str" if tag == "merge" else tag](node.value)
    except (ValueError, KeyError):
        raise ValueError(
            f"{_place(node.start_mark)}: {shown(node.value)} is not a valid !!{tag}."
        ) from None


def _table(node: Any, made: dict[int, Any]) -> dict[Any, Any]:
    own: dict[Any, Any] = {}
    merged: dict[Any, Any] = {}
    merges = 0
    for key_node, value_node in node.value:
        if key_node.tag == f"{_TAGS}merge":
            merges += 1
            merged = _merged(value_node, made)
            twice = merges > 1
        elif key_node.id != "scalar":
            raise ValueError(f"{_place(key_node.start_mark)}: a key is a {key_node.id}.")
        else:
            key = _value(key_node, made)
            twice = key in own
            own[key] = _value(value_node, made)
        if twice:
            raise ValueError(
                f"{_place(key_node.start_mark)}: the key {shown(key_node.value)} appears twice in "
                f"one table."
            )
    return {**merged, **own}


def _merged(node: Any, made: dict[int, Any]) -> dict[Any, Any]:
    """The tables that `<<` merges; if several have a key, the first is used."""
    tables = node.value if node.id == "sequence" else [node]
    if any(one.id != "mapping" for one in tables):
        raise ValueError(f"{_place(node.start_mark)}: `<<` takes a table, or a list of tables.")
    found: dict[Any, Any] = {}
    for one in reversed(tables):
        found |= _value(one, made)
    return found


def _short(tag: str) -> str:
    return f"!!{tag.removeprefix(_TAGS)}" if tag.startswith(_TAGS) else tag


def _place(mark: Any) -> str:
    return "the text" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}"
