"""Every block of Python in the documentation runs, and prints what its page says.

`python -m tests.docs.test_blocks docs/page.md ...` writes what blocks print into pages.
"""

import contextlib
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import fxtrain as fx
from docs._sphinx import site_pages
from fxtrain.testing import Cluster
from tests.docs.blocks import Block, blocks_of, packages_of, with_texts
from tests.docs.running import Problem, problems_of, unknown_names

ROOT = Path(__file__).parents[2]
PAGES = site_pages.written_pages(ROOT / "docs")


ELSEWHERE = {"start/from_raw_loop", "steps"}  # tests/test_surface.py, tests/test_steps_page.py


def _problems(path: Path, folder: Path, pair: Cluster) -> list[Problem]:
    return list(problems_of(list(blocks_of(path.read_text())), folder, pair))


def _shown(problem: Problem) -> str:
    return f"line {problem.block.line}: {problem.text}"


def _with_code(name: str) -> bool:
    return any(block.language == "python" for block in blocks_of(PAGES[name].read_text()))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one.startswith("tutorials") else [])
        for one in PAGES
        if one not in ELSEWHERE and _with_code(one)
    ],
)
def test_the_blocks_of_a_page_run(name, tmp_path, pair):
    for package in packages_of(PAGES[name].read_text()):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    problems = _problems(PAGES[name], tmp_path, pair)
    assert not problems, "\n".join(map(_shown, problems))


@pytest.mark.parametrize("name", PAGES)
def test_blocks_that_do_not_run_name_what_exists(name):
    for block in blocks_of(PAGES[name].read_text()):
        if block.kind == "not run" and block.language == "python":
            assert block.detail, f"line {block.line}: say why it does not run"
            assert unknown_names(block.text) == [], f"line {block.line}"


PAGE = """
<!-- setup
x = 1
-->
<!-- prints -->
```python
print(x + 1)
```

```text
3
```
<!-- raises -->
```python
fx.Plan(accumulate=0)
```
```text
PlanError: ...
```
```python
y = x.missing
```
"""


def test_a_page_that_says_something_else_is_found(tmp_path, pair):
    blocks: list[Block] = list(blocks_of(PAGE))
    assert [block.kind for block in blocks] == ["setup", "prints", "", "raises", "", ""]
    wrong, failed = problems_of(blocks, tmp_path, pair)
    assert (wrong.block.text, wrong.found) == ("3\n", "2\n")
    assert failed.found is None and "has no attribute 'missing'" in failed.text
    assert unknown_names("fx.Plan\nfx.ops.gather(1)\nfx.plam\nfx.ops.gathr") == [
        ".plam",
        ".ops.gathr",
    ]


def _started(ctx: fx.DistContext) -> None:
    """Nothing."""


def _write(paths: list[Path]) -> None:
    with contextlib.closing(Cluster(2, timeout_s=60.0, call_s=200.0)) as pool:
        pool.run(_started)  # here, not in a folder that is removed
        for path in paths:
            with tempfile.TemporaryDirectory() as folder:
                problems = _problems(path, Path(folder), pool)
            found = {one.block: one.found for one in problems if one.found is not None}
            with_texts(path, found)
            for one in problems:
                sys.stdout.write(f"{path}, {'written, ' if one.found else ''}{_shown(one)}\n")


if __name__ == "__main__":
    _write([Path(name).absolute() for name in sys.argv[1:]])
