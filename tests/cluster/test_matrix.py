"""Strategies × operations: each cell gives what one process gives, or names the reason."""

import attrs
import pytest
import torch

import fxtrain as fx
from tests._slow import slow_after
from tests.cluster._matrix import compare, compare_files, everything, write_halves
from tests.cluster._models import PIPELINES

BLOCKS = ("LlamaDecoderLayer",)


@attrs.frozen(kw_only=True)
class Row:
    """One strategy: ranks, fields of the plan, a mesh, and what its module says of generate."""

    n: int = 2
    options: dict
    mesh: fx.Mesh | None = None
    says: str | None = None


PP = "PP: model.module was called, but this rank has"
ROWS = {
    "DDP": Row(options={"strategy": fx.DDP()}),
    "DDP, shared optimizer": Row(options={"strategy": fx.DDP(shard_optimizer=True)}),
    "FSDP": Row(options={"strategy": fx.FSDP()}),
    "FSDP, compiled": Row(
        options={
            "strategy": fx.FSDP(),
            "compile": fx.Compile(backend="eager", blocks=BLOCKS),
            "recompute": BLOCKS,
        }
    ),
    "FSDP, zero-2": Row(options={"strategy": fx.FSDP(mode="grads_and_optimizer")}),
    "FSDP, copies": Row(n=4, options={"strategy": fx.FSDP(shard=2)}),
    "FSDP and TP": Row(
        n=4, options={"strategy": fx.FSDP(tensor=fx.TP())}, mesh=fx.Mesh(shard=2, tensor=2)
    ),
    "CP": Row(
        options={"strategy": fx.FSDP(), "context": fx.CP(causal=True)},
        mesh=fx.Mesh(context=2),
        says="takes part of a sequence",
    ),
    "PP": Row(options={"strategy": fx.PP()}, mesh=fx.Mesh(pipeline=2), says=PP),
    "PP, sharded": Row(
        n=4,
        options={"strategy": fx.PP(stages=fx.FSDP())},
        mesh=fx.Mesh(pipeline=2, shard=2),
        says=PP,
    ),
}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The files of a model with other values."""
    return write_halves(tmp_path_factory.mktemp("other"), torch.float64)


@pytest.fixture(scope="module")
def truth(clusters, other, tmp_path_factory):
    """What one process gives."""
    folder = str(tmp_path_factory.mktemp("one"))
    options = {"strategy": fx.Single()}
    (found,) = clusters[1].run(everything, options, None, other, folder, torch.float64)
    return found


@pytest.mark.parametrize(
    "name",
    slow_after(
        0,
        [
            pytest.param(name, marks=[PIPELINES] if row.says == PP else [])
            for name, row in ROWS.items()
        ],
    ),
)
def test_a_strategy_does_everything(clusters, truth, other, tmp_path, name):
    row = ROWS[name]
    found = clusters[row.n].run(
        everything, row.options, row.mesh, other, str(tmp_path), torch.float64
    )
    compare(found, truth, rtol=1e-6, atol=1e-8)
    for one in found:
        said = one["generate of the module"]
        assert (row.says in said) if row.says else said == truth["generate of the module"]
    compare_files(found, tmp_path)
