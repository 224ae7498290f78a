"""docs/versions.md lists every package that fxtrain can use, as pyproject.toml allows it."""

import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Extras of those who work on fxtrain.
OWN = {"test", "test-quant", "bench", "docs", "dev"}


def _allowed() -> dict[str, str]:
    extras = PROJECT["optional-dependencies"]
    found = {"Python": PROJECT["requires-python"]}
    for needs in (PROJECT["dependencies"], *(extras[name] for name in extras.keys() - OWN)):
        for one in needs:
            name, limits = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", one).groups()
            if name != "fxtrain":
                found[name] = limits
    return found


def _rows() -> dict[str, list[str]]:
    page = (ROOT / "docs" / "versions.md").read_text()
    lines = page.partition("\n## Machines\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return {name: rest for name, *rest in cells[2:]}


def test_the_table_has_what_the_project_allows():
    assert {name: cells[0] for name, cells in _rows().items()} == _allowed()


def test_the_page_of_installing_has_every_extra():
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    extras = PROJECT["optional-dependencies"].keys() - OWN - {"recipes"}
    assert [name for name in sorted(extras) if f"`{name}`" not in page] == []


def test_versions_that_were_tested_are_allowed():
    for name, (allowed, oldest, newest, _) in _rows().items():
        tested = [Version(one) for one in (oldest, newest) if one]
        assert tested == sorted(tested), name
        assert all(SpecifierSet(allowed).contains(one) for one in tested), name


def test_versions_of_torch_are_those_of_the_private_names():
    _, oldest, newest, _ = _rows()["torch"]
    names = tomllib.loads((ROOT / "tests" / "private_torch_names.toml").read_text())
    first, *_, last = names["versions"]
    assert Version(oldest).release[:2] == Version(first).release
    assert Version(newest).release[:2] == Version(last).release
