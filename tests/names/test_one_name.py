"""One meaning, one name: a public function or class is defined under its name in one module."""

import ast
import collections
import pathlib

import attrs

import fxtrain
from fxtrain.state import Strategy

ROOT = pathlib.Path(fxtrain.__file__).parent
# Each strategy defines functions under the names of the fields that they fill, and `fx.ops` has
# those of a step in parts.
STRATEGY = {field.name for field in attrs.fields(Strategy)}
SEVERAL = {
    "main": "what a program runs; each is a program of its own",
    "Memory": "fx.meters.Memory in use now, and fx.state.Memory by its use",
    "Run": "fx.testing.Run of a law, and fx.trackers.Run of a tracker",
    "Traffic": "fx.state.Traffic of a dry run, and fx.testing.Traffic that a test counts",
    "place": "fx.big.place puts layers on devices, and fx.profiling.place the variables of a rank",
    "release": "fx.big.release and fx.release both give memory back",
    "save": "fx.save writes a checkpoint, and fx.ops.save a value",
    "table": "fx.big.table and fx.profiling.table, of what their packages measure",
}


def defined_names() -> dict[str, set[str]]:
    """The modules in which each public function or class is defined."""
    modules = collections.defaultdict[str, set[str]](set)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                modules[node.name].add(str(path.relative_to(ROOT)))
    return {name: there for name, there in modules.items() if not name.startswith("_")}


def test_a_public_name_is_defined_in_one_module():
    several = {
        name: sorted(modules)
        for name, modules in defined_names().items()
        if len(modules) > 1 and name not in STRATEGY
    }
    assert set(several) == set(SEVERAL), {
        name: several.get(name) for name in set(several) ^ set(SEVERAL)
    }
    assert len(SEVERAL) <= 15
