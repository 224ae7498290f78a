"""What `import fxtrain` gives: the names, what they cost, and what pages say of them."""

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fxtrain as fx
from fxtrain import ops
from tests.launched._run import PYTHON, run_fork

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
NAMES = (ROOT / "docs" / "public_names.md").read_text()
RAW_LOOP = (ROOT / "docs" / "start" / "from_raw_loop.md").read_text()

# Each error also is the builtin that it resembles.
BUILTINS = {
    "CheckpointError": RuntimeError,
    "CollectiveError": RuntimeError,
    "ContextError": RuntimeError,
    "DataError": ValueError,
    "LaunchError": RuntimeError,
    "MeshError": ValueError,
    "MissingPackageError": ImportError,
    "PlanError": ValueError,
    "StepError": RuntimeError,
}


def _python(code: str) -> str:
    """What a fresh interpreter prints for a program."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_sorted_and_resolve():
    assert fx.__all__ == sorted(set(fx.__all__))
    assert all(getattr(fx, name) is not None for name in fx.__all__)
    assert dir(fx) == sorted({*fx.__all__, *fx._MODULES, "__version__"})


@pytest.mark.parametrize("name", [*fx._MODULES, "launchers"])
def test_a_package_completes_to_its_public_names(name):
    package = importlib.import_module(f"fxtrain.{name}")
    assert dir(package) == sorted(package.__all__)
    assert all(hasattr(package, public) for public in package.__all__)


def test_a_name_that_ops_does_not_have_is_answered():
    answers = {
        "wait_for_everyone": "Use fx.ops.barrier(ctx).",
        "all_reduce": "Use fx.ops.reduce(",
        "gater": "Did you mean 'gather'?",
    }
    for name, answer in answers.items():
        with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}. {answer}")):
            getattr(ops, name)
    assert not hasattr(ops, "purple") and not hasattr(ops, "__wrapped__")


def test_each_line_of_the_stub_is_one_name_under_its_own():
    stub = ast.parse((ROOT / "fxtrain" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert [ast.get_docstring(stub) is None, *imports] == [False, *stub.body[1:]]
    names = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    assert names == {*fx.__all__, *fx._MODULES, "__version__"} and len(names) == len(imports)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        fx.Trainer


@pytest.mark.parametrize("name", sorted(BUILTINS))
def test_errors_are_one_tree(name):
    error = getattr(fx.errors, name)
    assert issubclass(error, fx.FxError)
    assert issubclass(error, BUILTINS[name])
    assert set(BUILTINS) | {"FxError"} == {n for n in fx.errors.__all__}


@pytest.mark.slow
def test_the_library_loads_nothing_optional():
    program = """
import json, sys
import torch, attrs, cattrs, safetensors, rich
packages = lambda: {name.partition(".")[0] for name in sys.modules}
core = packages()
from fxtrain import *
import fxtrain.ops, fxtrain.cli
assert "torch._dynamo" not in sys.modules  # a second, which an optimizer of torch's takes anyway
from fxtrain._other_names import _table
assert _table.cache_info().currsize == 0  # names of other libraries are read for an error
assert not hasattr(fxtrain, "wait_for_everyone") and _table.cache_info().currsize == 1
print(json.dumps(sorted(packages() - core)))
"""
    extra = set(json.loads(_python(program).splitlines()[-1]))
    assert "fxtrain" in extra
    optional = {"tomlkit", "yaml", "cloudpickle", "sklearn", "deepspeed", "torch_xla", "accelerate"}
    assert not extra & (optional | {"numpy", "hypothesis", "pytest"})


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fx.__version__ == project["version"] == importlib.metadata.version("fxtrain")
    assert f"## {fx.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "fxtrain" / "py.typed").is_file()


def _table(heading: str, column: int) -> set[str]:
    """Names in backticks in one column of the table of public names that starts with a heading."""
    lines = NAMES.splitlines()
    start = lines.index(heading) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append(line.split("|")[column + 1])
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("package", [fx, ops], ids=lambda package: package.__name__)
def test_public_functions_have_examples(package):
    files = {"read_plan", "write_plan"}  # their examples would leave files behind
    functions = {n: getattr(package, n) for n in package.__all__ if n not in files}
    bare = [
        name
        for name, value in functions.items()
        if callable(value) and not isinstance(value, type) and ">>>" not in (value.__doc__ or "")
    ]
    assert bare == []


def test_a_page_lists_exactly_the_public_names():
    assert _table("| Name | Is |", 0) == set(fx.__all__)
    assert _table("| `fx.ops` for | Names |", 1) == set(ops.__all__)


def _example(name: str) -> str:
    page = README if name == "ten_lines" else RAW_LOOP
    return re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", page, re.DOTALL)[1]


@pytest.mark.parametrize("name", ["ten_lines", "raw", "with_fxtrain"])
def test_the_examples_run(name, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text(f"import torch\ntorch.manual_seed(0)\n{_example(name)}")  # else it may vary
    done = run_fork(*PYTHON, "-W", "error", str(script))
    assert done.code == 0, done.err
    loss = float(done.out.splitlines()[-1].split()[-1])
    assert loss < (0.01 if name == "ten_lines" else 0.6)


def test_the_ten_lines_are_ten():
    assert len([line for line in _example("ten_lines").splitlines() if line.strip()]) == 10


def test_every_changed_line_is_marked():
    raw = set(_example("raw").splitlines())
    for line in _example("with_fxtrain").splitlines():
        assert line.endswith("# *") == (line not in raw), line
