"""The shape of the code itself: small functions, small files, sorted surfaces, no shortcuts."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "fxtrain").rglob("*.py"))
PACKAGES = [path for path in SOURCES if path.name == "__init__.py"]
TESTS = sorted(path for name in ("tests", "property_tests") for path in (ROOT / name).rglob("*.py"))

FILE_LINES = 400
TEST_FILE_LINES = 300
FOLDER_FILES = 25
FUNCTION_LINES = 40


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_file_is_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES, f"{_name(path)} has {lines} lines: split it by what it does"


def test_test_files_are_short():
    sizes = {_name(path): len(path.read_text().splitlines()) for path in TESTS}
    long = {name: lines for name, lines in sizes.items() if lines > TEST_FILE_LINES}
    assert long == {}, "split these files by subject; what both parts need goes into a _helper.py"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_functions_are_short(path):
    long = {
        f"{_name(path)}:{function.lineno} {function.name}": _body_lines(function)
        for function in _functions(_tree(path))
        if _body_lines(function) >= FUNCTION_LINES
    }
    assert not long


def test_a_folder_is_small():
    folders = {path.parent for path in SOURCES}
    sizes = {_name(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: files for name, files in sizes.items() if files > FOLDER_FILES} == {}


@pytest.mark.parametrize("path", PACKAGES, ids=_name)
def test_what_a_package_exports_does_not_hide_its_modules(path):
    """`fxtrain.ops.gather` is the function: a module of that name would be lost behind it."""
    module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    modules = {found.stem for found in path.parent.iterdir() if (found.suffix or ".py") == ".py"}
    callable_package = {"launch", "profile", "track"} if path.parent.name == "fxtrain" else set()
    assert modules & set(module.__all__) - {"ops", "state"} == callable_package


@pytest.mark.parametrize("path", [p for p in PACKAGES if p.parent.name != "fxtrain"], ids=_name)
def test_a_package_only_re_exports(path):
    defined = [
        node.name
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    assert not defined


@pytest.mark.parametrize("path", PACKAGES, ids=_name)
def test_a_surface_is_sorted_and_there(path):
    module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    names = module.__all__
    assert list(names) == sorted(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_nothing_is_put_off_or_swallowed(path):
    text = path.read_text()
    # In two halves, so that a search for these words finds only real ones.
    assert not re.search("TO" + r"DO\b|FIX" + "ME|NotImplemented" + "Error", text)
    swallowed = [
        handler.lineno
        for handler in ast.walk(ast.parse(text))
        if isinstance(handler, ast.ExceptHandler)
        and all(isinstance(statement, ast.Pass) for statement in handler.body)
        and _is_broad(handler.type)
    ]
    assert not swallowed


def _is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (
        isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")
    )


# The records that may change, each with the reason.
MUTABLE = {
    "fxtrain.state.context.CommState": "counts the calls made on one communicator",
    "fxtrain.ops.transport.packets.Packets": "which packets of one communicator are under way",
    "fxtrain.checkpoint.local_storage._EagerFlush": "how much of a file is flushed",
    "fxtrain.data.iterations.Iteration": "how far iterators over one loader got",
    "fxtrain.backends.xla.recompilations.RecompilationLog": "counts compilations of one model",
    "fxtrain.backends.pipeline.schedules.PreparedSchedule": "its results are described once",
    "fxtrain.profile.tracing.opening.Trace": "how far a schedule got",
    "fxtrain.profile.tracing.recording.Recording": "one cycle of torch's profiler",
    "fxtrain.loop.fit_entries.Entries": "what fit measured since the last entry of its trackers",
    "fxtrain.backends.pipeline.execute._GivenOutputs": "whether the loss has called the model",
}


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_records_are_frozen(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    loose = [
        f"{module.__name__}.{name}"
        for name, value in vars(module).items()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and attrs.has(value)
        and value.__setattr__ is object.__setattr__
    ]
    assert [name for name in loose if name not in MUTABLE] == []


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_no_mutable_state_at_module_level(path):
    """A container that nothing changes is a constant; what changes it is the mistake."""
    tree = _tree(path)
    constants = {
        target.id
        for node in tree.body
        for target in _targets(node)
        if isinstance(target, ast.Name) and not target.id.startswith("__")
    }
    changes = [
        f"{_name(path)}:{node.lineno} {name}"
        for node in ast.walk(tree)
        if (name := _changed(node)) in constants
    ]
    assert not changes


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


@pytest.mark.parametrize(("path", "names"), WALKED, ids=[path for path, _ in WALKED])
def test_a_walk_names_what_is_there(path, names):
    functions = {function.name for function in _functions(_tree(ROOT / path))}
    assert set(re.findall(r"`(\w+)`", names)) <= functions


def test_the_guide_names_files_that_are_there():
    assert len(WALKED) > 20
    named = set(re.findall(r"`(fxtrain/[\w/.]+)`", GUIDE)) - {"fxtrain/track/"}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
