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


FIT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import fxtrain as fx

ctx = fx.detect(device="cpu")
net = torch.nn.Linear(2, 1)
model = fx.wrap(net, ctx, fx.Plan(), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
fns = fx.StepFns(model=model, loss=lambda m, b: m(b[0]).square().mean())
rows = fx.shard(DataLoader(TensorDataset(torch.ones(24, 2)), batch_size=2), ctx)
for report in fx.fit(ctx, fns, rows, FOLDER, epochs=2, log_every=5):
    pass
"""


@pytest.mark.recipes
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_progress_is_one_output_of_the_cell(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    v4 = pytest.importorskip("nbformat").v4
    book = v4.new_notebook(cells=[v4.new_code_cell(FIT.replace("FOLDER", repr(str(tmp_path))))])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute(cwd=str(ROOT))
    (bar,) = (out for out in book.cells[0].outputs if out.output_type == "display_data")
    assert "24/24" in bar["data"]["text/plain"] and "loss" in bar["data"]["text/plain"]
    assert "24 of 24" not in str(book.cells[0].outputs)  # the lines of a file
