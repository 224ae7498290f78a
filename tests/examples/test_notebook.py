"""The notebook has no outputs, and its cells train on two ranks."""

import ast
import json

import pytest

from tests.launched._run import ROOT

PATH = ROOT / "examples" / "notebook.ipynb"


def test_no_outputs_are_committed():
    cells = json.loads(PATH.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.recipes
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # those of Jupyter's packages
def test_cells_train_on_two_ranks_and_resume_on_one():
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(PATH, as_version=4)
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute(cwd=str(ROOT))
    shown = [
        ast.literal_eval(output["data"]["text/plain"])
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    pair, single, curve = shown
    assert [rank["rank"] for rank in pair] == [0, 1]
    assert pair[0]["accuracy"] == pair[1]["accuracy"] > 0.8
    assert pair[0]["updates"] == 94 and single[0]["updates"] == 188
    assert single[0]["accuracy"] > 0.85 and curve[-1][0] == 188
