"""Checks that what an answer tells to write exists."""

import ast
import builtins
import contextlib
import importlib
import inspect
import re

import attrs

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.cli.launch_command import LAUNCH
from fxtrain.launchers import LAUNCHERS, LaunchSpec
from fxtrain.launchers.spec import FLAGS
from fxtrain.state import structure, unstructure
from fxtrain.state.parsing import put

_OBJECTS = {
    "batch": fx.Batch, "ctx": fx.DistContext, "loader": fx.Sharded, "model": fx.Wrapped,
    "report": fx.Report, "run": fx.trackers.Run,
}  # fmt: skip


def check_answer(use, path):
    """Every alternative of an answer, with its field in a launch file."""
    uses = re.split(r",? (?:or|and) |\), (?=fx)", use)
    paths = path.split(" or ")
    for number, part in enumerate(uses):
        if part.startswith("fxtrain "):
            _check_command(part, path)
        else:
            part += ")" * (part.count("(") - part.count(")"))
            _check_code(part.removeprefix("with "), paths[number] if path else "")


def _check_command(use, path):
    words = use.split()
    if words[1] != "launch":
        commands = [word for word in words[1:3] if word.isalpha()]
        assert main([*commands, "--help"]) == 0
        return
    given = LAUNCH.make_context("launch", words[2:]).params
    assert given["program"][:1] == (words[-1],)
    if "--option" in words:
        options = LAUNCHERS[given["launcher"]].options
        assert words[words.index("--option") + 1].split("=")[0] in attrs.fields_dict(options)
    if path:
        field = path.removeprefix("launch.")
        default = attrs.fields_dict(LaunchSpec)[field].default
        assert given[field] not in (None, (), "", False, default)
        assert words[2] in [flag.flag for flag in FLAGS if flag.field == field]


def _check_code(use, path):
    use = use.partition(" as ")[0]  # of a with statement
    for node in ast.walk(ast.parse(use, mode="eval")):
        if isinstance(node, ast.Attribute):
            assert hasattr(_value(node.value), node.attr) or _has_field(node), use
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") != "model":
            try:
                parameters = inspect.signature(_value(node.func)).parameters
            except ValueError:  # written in C, without a signature
                continue
            names = {word.arg for word in node.keywords}
            free = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            assert free or names <= parameters.keys(), use
            assert free or len(node.args) <= len(parameters), use
            if isinstance(_value(node.func), type) and "..." not in ast.unparse(node):
                with contextlib.suppress(NameError):  # of what a script has
                    eval(ast.unparse(node), {"fx": fx})
    if path:
        assert path.startswith("plan.")
        _check_field(use, path.removeprefix("plan."))


def _has_field(node):
    return node.attr in attrs.fields_dict(_value(node.value))


def _value(node):
    """What a dotted name of an expression is; an object for those of a result."""
    if isinstance(node, ast.Name):
        if node.id in _OBJECTS:
            return _OBJECTS[node.id]
        return fx if node.id == "fx" else getattr(builtins, node.id, None) or _module(node.id)
    if isinstance(node, ast.Call):
        returned = {"axis": fx.DistContext, "log": fx.ops.RankLogger}
        return returned[node.func.attr]
    owner = _value(node.value)
    fields = attrs.fields_dict(owner) if attrs.has(owner) else {}
    inner = {"plan": fx.Plan, "position": fx.Position, "data": fx.Data}
    return inner[node.attr] if node.attr in fields else getattr(owner, node.attr)


def _module(name):
    return importlib.import_module(name)


def _check_field(use, path):
    """A plan whose field a file sets to the same value."""
    plan = eval(use, {"fx": fx})
    value = _at(unstructure(plan), path)
    changed = [change.path for change in fx.diff(plan, fx.Plan())]
    same = use in ("fx.Plan(compile=False)", "fx.Plan(seed=0)")
    assert same or any(path.startswith(one) or one.startswith(path) for one in changed), use
    base = unstructure(plan) if "." in path else {}
    assert _at(unstructure(structure(put(dict(base), path, value), fx.Plan)), path) == value


def _at(data, path):
    for name in path.split("."):
        data = data[name]
    return data
