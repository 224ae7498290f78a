"""The examples of docs/steps.md run, and print what the page is about."""

import re
from pathlib import Path

import pytest

from tests.launched._run import PYTHON, run_fork

PAGE = (Path(__file__).parents[1] / "docs" / "steps.md").read_text()
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
PRINTED = {
    "keep_your_loop": r"20 updates, loss 0\.\d+",
    "parts": "6 updates, equal in every bit: True",
    "no_decay": "2 with weight decay, 4 without",
    "unfreezing": "178 parameters in 2 groups",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_page_runs(name, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text(EXAMPLES[name])
    done = run_fork(*PYTHON, "-W", "error", str(script))
    assert done.code == 0, done.err
    assert re.fullmatch(PRINTED[name], done.out.strip())
