"""Private names of torch that fxtrain uses: one list, with the versions in which they exist."""

import ast
import importlib
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIST = tomllib.loads((ROOT / "tests" / "private_torch_names.toml").read_text())
NAMES, ATTRIBUTES, OTHERS = LIST["names"], LIST["attributes"], LIST["others"]
_MISSING = object()
_MODULES = {"_autograd", "_profiler"}  # of torch._C
_OF_NAMED_TUPLES = {"_asdict", "_fields", "_make"}  # public methods of Python's
HERE = ".".join(torch.__version__.split(".")[:2])


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Names that a file defines or assigns somewhere."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).rpartition(".")[2])
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            found |= {node.attr} if own else set()
    return found


def _imports(nodes: list[ast.AST]) -> dict[str, str]:
    """What each name in a file stands for, of torch."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.partition(".")[0] == "torch":
                    found[one.asname or "torch"] = one.name if one.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def _dotted(node: ast.AST, names: dict[str, str]) -> str:
    """An expression such as `dist.distributed_c10d._world`, in full; empty if it is not torch's."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join([names[node.id], *reversed(parts)])


def used() -> tuple[set[str], set[str]]:
    """Private names by path, and private attributes of objects, that the source uses."""
    own: set[str] = set()
    names: set[str] = set()
    attributes: set[str] = set()
    for file in (ROOT / "fxtrain").rglob("*.py"):  # one at a time: all nodes are 400,000
        nodes = list(ast.walk(ast.parse(file.read_text())))
        own |= _defined(nodes)
        imported = _imports(nodes)
        names |= set(filter(_private, imported.values()))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Attribute):
                path = _dotted(node, imported)
                if path and _private(path) and id(node) not in inner:
                    names.add(path)
                elif not path and _private(node.attr):
                    attributes.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "hasattr",
            ):
                name = node.args[1]
                if isinstance(name, ast.Constant) and _private(str(name.value)):
                    attributes.add(str(name.value))
    # A module is no other name beside those that are used of it.
    names = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    attributes -= _OF_NAMED_TUPLES | _MODULES
    return names, attributes - (own - set(ATTRIBUTES))  # which a class of ours may set as well


def _find(path: str) -> Any:
    """What a dotted path leads to; `_MISSING` if it does not exist."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for count, name in enumerate(rest):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(".".join([first, *rest[: count + 1]]))
            except ImportError:
                return _MISSING
    return found


def _has(owner: str, name: str) -> bool:
    """Whether a class or module has an attribute, on itself or on its instances."""
    found = _find(owner)
    if found is _MISSING or hasattr(found, name):
        return found is not _MISSING
    try:
        return name in inspect.getsource(inspect.getmodule(found) or found)
    except TypeError:  # written in C++
        return False


def test_every_private_name_is_listed():
    names, attributes = used()
    assert names == set(NAMES)
    assert attributes == set(ATTRIBUTES) | set(OTHERS)


def test_each_has_a_reason_and_they_do_not_become_more():
    assert all(one["why"] for one in (*NAMES.values(), *ATTRIBUTES.values()))
    assert len(NAMES) + len(ATTRIBUTES) <= 90


def test_versions_are_those_that_are_tested():
    every = set(LIST["versions"])
    seen = [one["seen"] for one in (*NAMES.values(), *ATTRIBUTES.values())]
    assert all(versions and set(versions) <= every for versions in seen)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_exist_where_they_were_seen(name: str):
    if HERE in LIST["versions"]:
        assert (_find(name) is not _MISSING) == (HERE in NAMES[name]["seen"])
    elif NAMES[name]["seen"] == LIST["versions"]:
        assert _find(name) is not _MISSING


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_attributes_exist_where_they_were_seen(name: str):
    owners, seen = ATTRIBUTES[name]["of"].split(), ATTRIBUTES[name]["seen"]
    exists = any(_has(owner, name) for owner in owners)
    if HERE in LIST["versions"]:
        assert exists == (HERE in seen)
    elif seen == LIST["versions"]:
        assert exists
