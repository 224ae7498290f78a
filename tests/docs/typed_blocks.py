"""Write the blocks of the documentation that do not run as modules for a type checker.

`python -m tests.docs.typed_blocks FOLDER`; `make lint` checks them.
"""

import ast
import sys
from pathlib import Path

from docs._sphinx import site_pages
from tests.docs.blocks import blocks_of

# Packages that are not installed are no mistakes, and what a page shows as an expression neither.
_HEAD = """\
# pyright: reportMissingImports=false, reportUnusedExpression=none
# {page}
from collections.abc import Callable
from typing import Any

import evaluate, pytest, rich, torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAUROC

import fxtrain
import fxtrain as fx
from fxtrain import ops
from fxtrain.testing import LAWS, Cluster

class Net(nn.Module): ...
class MyBatch(dict[str, Tensor]): ...
class Adapted(nn.Module):
    def __init__(self, net: nn.Module) -> None: ...
class Generating(nn.Module):
    def generate(self, ids: Tensor) -> Tensor: ...
class AutoModelForCausalLM:
    @staticmethod
    def from_config(config: Any) -> Generating: ...
class Mine:
    kind = "mine"
def given() -> Any: ...

"""
# Types of what the text of a page introduces before such a block.
_GIVEN = {
    "fx.DistContext": "ctx",
    "fx.Plan": "plan",
    "fx.Wrapped[Any]": "model",
    "fx.Sharded[Any]": "loader",
    "fx.Batch[Any]": "batch",
    "fx.StepFns": "fns",
    "fx.Report": "report",
    "fx.state.Placement": "placement",
    "fx.state.DryRun": "other",
    "nn.Module": "net llama",
    "Tensor": "ids prompt x",
    "str": "folder",
    "Dataset[Any]": "data rows",
    "DataLoader[Any]": "held_out tests torch_loader",
    "list[dict[str, Tensor]]": "batches",
    "Callable[[], nn.Module]": "build make_net",
    "Callable[[nn.Module], nn.Module]": "adapted",
    "Callable[[Any], torch.optim.Optimizer]": "adamw",
    "Callable[[Any, Any], Tensor]": "accuracy loss",
    "Callable[[fx.DistContext], None]": "train",
    "Callable[[list[Any]], MyBatch]": "mine",
    "Any": "config decoder denoiser encoder optimizer",
}


def _module(page: Path, text: str) -> str:
    """A block after what it uses and does not bind itself."""
    names = {
        (node.id, type(node.ctx)) for node in ast.walk(ast.parse(text)) if type(node) is ast.Name
    }
    bound = {name for name, how in names if how is ast.Store}
    bound |= {node.name for node in ast.parse(text).body if type(node) is ast.FunctionDef}
    lines = [
        f"{name}: {kind} = given()\n"
        for kind, group in _GIVEN.items()
        for name in group.split()
        if (name, ast.Load) in names and name not in bound
    ]
    return _HEAD.format(page=page) + "".join(lines) + "\n" + text


def main(folder: Path) -> None:
    """Write one module for each block, named after its page and line."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for name, path in site_pages.written_pages(Path("docs").resolve()).items():
        for block in blocks_of(path.read_text()):
            if block.kind == "not run" and block.language == "python":
                module = f"{name.replace('/', '_')}_{block.line}.py"
                (folder / module).write_text(_module(path, block.text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
