"""The shape of the code itself: small functions, small files, sorted surfaces, no shortcuts."""

import ast
import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import attrs
import pytest

from fxtrain import _extensions
from fxtrain._stubs import load_name
from fxtrain.state.registry import BUILT_IN

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "fxtrain").rglob("*.py"))
PACKAGES = [path for path in SOURCES if path.name == "__init__.py"]
PACKAGE = ROOT / "fxtrain" / "__init__.py"
_EXTENSIONS = (ROOT / "fxtrain" / "_extensions.pyi").read_text()
TESTS = sorted(path for name in ("tests", "property_tests") for path in (ROOT / name).rglob("*.py"))

FILE_LINES = 600
TEST_FILE_LINES = 600
FOLDER_FILES = 40
FUNCTION_LINES = 60
_FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
}  # of torch, on the default device


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def _module(path: Path) -> ModuleType:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize(
    ("paths", "most"), [(SOURCES, FILE_LINES), (TESTS, TEST_FILE_LINES)], ids=["library", "tests"]
)
def test_files_are_short(paths, most):
    sizes = {_name(path): len(path.read_text().splitlines()) for path in paths}
    long = {name: lines for name, lines in sizes.items() if lines > most}
    assert long == {}, "split these files by subject; what both parts need goes into a helper"


def test_functions_are_short():
    long = {
        f"{_name(path)}:{function.lineno} {function.name}": _body_lines(function)
        for path in SOURCES
        for function in _functions(_tree(path))
        if _body_lines(function) >= FUNCTION_LINES
    }
    assert long == {}


def test_a_folder_is_small():
    folders = {path.parent for path in SOURCES}
    sizes = {_name(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: files for name, files in sizes.items() if files > FOLDER_FILES} == {}


def test_what_a_package_exports_does_not_hide_its_modules():
    """`fxtrain.ops.gather` is the function: a module of that name would be lost behind it."""
    for path in PACKAGES:
        found = path.parent.iterdir()
        modules = {one.stem for one in found if (one.suffix or ".py") == ".py"}
        hidden = modules & set(_module(path).__all__) - {"ops", "state"}
        assert hidden == set(), _name(path)


def test_a_package_only_re_exports():
    defined = [
        f"{_name(path)}:{node.lineno} {node.name}"
        for path in PACKAGES
        if path != PACKAGE
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    assert defined == []


def test_a_surface_is_sorted_and_there():
    for path in PACKAGES:
        module = _module(path)
        names = module.__all__
        assert list(names) == sorted(set(names)), _name(path)
        assert [name for name in names if not hasattr(module, name)] == [], _name(path)


# Where a call is for one strategy only, and refuses or ignores the plans of others.
OWN_CONFIGS = {
    "fxtrain/backends/deepspeed/config.py",
    "fxtrain/backends/deepspeed/setup.py",
}


def test_no_code_asks_which_strategy_a_plan_has():
    """What other code needs of a strategy is a field of its record."""
    configs = {config.__name__ for config in BUILT_IN}
    asks = {
        _name(path)
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and configs & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    }
    assert asks == OWN_CONFIGS


def test_nothing_is_put_off():
    # In two halves, so that a search for these words finds only real ones.
    words = re.compile("TO" + r"DO\b|FIX" + "ME|NotImplemented" + "Error")
    assert [_name(path) for path in SOURCES if words.search(path.read_text())] == []


def test_a_tensor_of_the_library_names_its_device():
    """So that `torch.set_default_device("cuda")` moves the user's tensors only."""
    bare = [
        f"{_name(path)}:{node.lineno}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[1] != "testing"  # has models, as users write them
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).removeprefix("torch.") in _FACTORIES
        and ast.unparse(node.func).startswith("torch.")
        and not {"device", "out", None} & {one.arg for one in node.keywords}
    ]
    assert bare == []


def test_nothing_is_swallowed():
    swallowed = [
        f"{_name(path)}:{handler.lineno}"
        for path in SOURCES
        for handler in ast.walk(_tree(path))
        if isinstance(handler, ast.ExceptHandler)
        and all(isinstance(statement, ast.Pass) for statement in handler.body)
        and _is_broad(handler.type)
    ]
    assert swallowed == []


def _is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (
        isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")
    )


# The records that may change, each with the reason.
MUTABLE = {
    "fxtrain.state.context.CommState": "whether a communicator can be used",
    "fxtrain.ops.same_errors.Together": "what a block has for the other ranks, and what they have",
    "fxtrain.ops.transport.exchange.CallState": "the calls made on one communicator",
    "fxtrain.ops.transport.exchange.Updates": "how many updates the models of a context have made",
    "fxtrain.ops.transport.exchange.Exchange": "how far one exchange of packets got",
    "fxtrain.ops.transport.messages.Messages": "which messages of an exchange are over",
    "fxtrain.ops.standing.RunFolder": "the folder of the run that a context trains",
    "fxtrain.ops.transport.pace.Pace": "how long a rank computed in its last steps",
    "fxtrain.checkpoint.background.CheckpointState": "what the last save and restore left",
    "fxtrain.checkpoint.folder_lock.Lock": "the thread that shows that its holder is alive",
    "fxtrain.checkpoint.saving._Job": "copies in place of the live tensors, or why there are none",
    "fxtrain.state.window.AccumulationWindow": "what a model counts",
    "fxtrain.state.window.ModelStatus": "what changes in the handle of a model",
    "fxtrain.data.fetch._Pass": "how far a pass over a stream got",
    "fxtrain.data.dataset_uses.DatasetUse": "what the loaders of a dataset know of it together",
    "fxtrain.data.sources._KnownEpoch": "the epoch that a dataset and its sampler know",
    "fxtrain.data.sharded_loader.Iteration": "how far iterators over one loader got",
    "fxtrain.data.sharded_loader.Reached": "the batch that a loader or its epochs yielded last",
    "fxtrain.backends.xla.strategy.RecompilationLog": "counts compilations of one model",
    "fxtrain.backends.pipeline.schedules.PreparedSchedule": "its results are described once",
    "fxtrain.choosing.searching._Search": "the plans that are left to try, and what was found",
    "fxtrain.profiling.tracing.Trace": "how far a schedule got",
    "fxtrain.loop.fit_entries.Entries": "what fit measured since the last entry of its trackers",
    "fxtrain.loop.fitting._Reader": "what a loop over reports tells their run",
    "fxtrain.loop.fitting._Loop": "how far a run of fit got, and its last checkpoint",
    "fxtrain.trackers.run.Run": "the last step of a run, and whether it is closed",
    "fxtrain.trackers.terminal.TerminalLines": "the last line that was written",
    "fxtrain.trackers.writer.OpenedTracker": "what it has, what it has lost, whether it hangs",
    "fxtrain.curves.reading.Curve": "the values of a metric that were read",
    "fxtrain.curves.reading.RunCurves": "what the lines that were read contain",
    "fxtrain.curves.reading.RunReader": "how far a file was read",
    "fxtrain.backends.offload.streaming.Streaming": "where values are, what is under way",
    "fxtrain.backends.offload.streaming.DeviceCopies": "which units are on their devices",
    "fxtrain.backends.offload.units.PlacedTensor": "where the values of a tensor are",
    "fxtrain.backends.offload.units.StreamedUnit": "where the values of a unit are",
    "fxtrain.big.swapping.Turns": "which of several models is on the device",
    "fxtrain.replicas.members.Members": "which replicas take part in an update",
    "fxtrain.replicas.rounds.Rounds": "what a replica has trained since the last average",
    "fxtrain.replicas.training._Run": "how far a replica got",
}


def test_records_are_frozen():
    pytest.importorskip("bitsandbytes")  # which modules of the library import
    loose = {
        f"{module.__name__}.{name}"
        for module in map(_module, SOURCES)
        for name, value in vars(module).items()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and attrs.has(value)
        and value.__setattr__ is object.__setattr__
    }
    assert loose == set(MUTABLE)


def test_no_mutable_state_at_module_level():
    """A container that nothing changes is a constant; what changes it is the mistake."""
    changes = [
        f"{_name(path)}:{node.lineno} {name}"
        for path in SOURCES
        for node in ast.walk(_tree(path))
        if (name := _changed(node)) in _constants(path)
    ]
    assert changes == []


@functools.cache
def _constants(path: Path) -> set[str]:
    return {
        target.id
        for node in _tree(path).body
        for target in _targets(node)
        if isinstance(target, ast.Name) and not target.id.startswith("__")
    }


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


_CHANGING = {"append", "extend", "add", "update", "setdefault", "pop", "clear", "insert", "remove"}


def _changed(node: ast.AST) -> str | None:
    """The name of the module-level value that a statement or call changes in place."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return owner.id if node.func.attr in _CHANGING and isinstance(owner, ast.Name) else None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return node.value.id if isinstance(node.value, ast.Name) else None
    return None


GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
WALKED = re.findall(r"^\| `(fxtrain/[\w/]+\.py)` \| (`.*?`) \|", GUIDE, re.MULTILINE)


def test_a_walk_names_what_is_there():
    for path, names in WALKED:
        functions = {function.name for function in _functions(_tree(ROOT / path))}
        assert set(re.findall(r"`(\w+)`", names)) - functions == set(), path


def test_the_guide_names_tables_that_are_there():
    tables = re.findall(r"`(\w+)` in `(fxtrain/[\w/]+\.py)`", GUIDE)
    assert len(tables) > 5
    missing = [
        f"{name} in {path}"
        for name, path in tables
        if name not in _constants(ROOT / path) | {"__all__"}
        and name not in {function.name for function in _functions(_tree(ROOT / path))}
    ]
    assert missing == []


def test_the_layout_has_every_package():
    layout = GUIDE.partition("## Layout")[2].partition("\n## ")[0]
    packages = {
        f"fxtrain/{path.name}/" if path.is_dir() else path.name
        for path in (ROOT / "fxtrain").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    named = {
        name.removeprefix("fxtrain/") if name.endswith(".py") else name
        for name in re.findall(r"`([\w/.]+)`", layout)
    }
    assert packages - named == {"__init__.py", "__main__.py", "_version.py"}


def test_the_core_and_what_stands_on_it_are_all_of_the_library():
    """By the contract in `pyproject.toml`; surfaces, which only re-export, belong to neither."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    name = "The core imports nothing that stands on it"
    (contract,) = (one for one in contracts["contracts"] if one["name"] == name)
    listed = (*contract["source_modules"], *contract["forbidden_modules"])
    loose = [
        name
        for path in SOURCES
        if path.name not in ("__init__.py", "__main__.py")
        and (name := _name(path).removesuffix(".py").replace("/", "."))
        and not any(f"{name}.".startswith(f"{one}.") for one in listed)
    ]
    assert loose == [], "name these modules in one of the two lists"


def test_every_extension_is_there_and_called_by_the_core():
    rows = re.findall(r"^from ([\w.]+) import (\w+) as (\w+)$", _EXTENSIONS, re.MULTILINE)
    assert rows == sorted(rows) and all(name == other for _, name, other in rows)
    for home, name, _ in rows:
        assert getattr(_extensions, name) is load_name(home, name)
    texts = "\n".join(path.read_text() for path in SOURCES if "_extensions" in path.read_text())
    used = {*re.findall(r"_extensions\.(\w+)", texts), *re.findall(r"^    +(\w+),$", texts, re.M)}
    used |= {
        name
        for line in re.findall(r"^    from fxtrain\._extensions import (\w.*)$", texts, re.M)
        for name in line.split(", ")
    }
    assert {name for _, name, _ in rows} - used == set()


def test_the_guide_names_files_that_are_there():
    assert len(WALKED) > 20
    named = set(re.findall(r"`(fxtrain/[\w/.]+)`", GUIDE))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
