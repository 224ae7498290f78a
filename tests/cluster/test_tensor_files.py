"""Tensors in a file, written once by all ranks or once per machine."""

import os

import pytest
import torch
from safetensors.torch import load_file

from fxtrain import CheckpointError, ops
from tests.cluster.test_nodes import _on_nodes


def _save(ctx, path, value=None):
    try:
        ops.save({"rank": torch.tensor(ctx.rank)} if value is None else value, path, ctx)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_rank_0_writes(cluster, tmp_path):
    path = tmp_path / "new" / "ranks.safetensors"
    assert set(cluster.run(_save, str(path))) == {"saved"}
    assert load_file(path)["rank"].item() == 0
    assert os.listdir(path.parent) == [path.name]


def test_nested_containers(pair, tmp_path):
    path, shared = tmp_path / "nested", torch.arange(6.0)
    value = {
        "a": {"b": shared, "c": [shared[:2], (shared.view(2, 3).T,)]},
        "empty": torch.zeros(0, 2),
        3: torch.tensor(True),
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
    }
    assert pair.run(_save, str(path), value) == ["saved"] * 2
    found = load_file(path)
    assert set(found) == {"a.b", "a.c.0", "a.c.1.0", "empty", "3", "half"}
    assert torch.equal(found["a.b"], shared) and torch.equal(found["a.c.0"], shared[:2])
    assert torch.equal(found["a.c.1.0"], shared.view(2, 3).T) and found["3"].item() is True
    assert found["half"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"lr": {"base": 0.1}}, "lr.base is a float"),
        (torch.zeros(2), "takes a dict of tensors, found Tensor"),
        ({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, "Two tensors are named 'a.b'"),
        ({"x": torch.zeros(1, dtype=torch.complex128)}, "no dtype torch.complex128"),
        ({"x": torch.zeros(2, device="meta")}, "x is a torch.strided tensor on meta"),
        ({"x": torch.eye(2).to_sparse()}, "x is a torch.sparse_coo tensor"),
    ],
    ids=["number", "tensor", "name", "dtype", "meta", "sparse"],
)
def test_a_value_that_cannot_be_written_fails_on_every_rank(pair, tmp_path, value, words):
    path = tmp_path / "x.safetensors"
    assert pair.run(_save, str(path)) == ["saved"] * 2
    found = pair.run(_save, str(path), value)
    assert found[0] == found[1] and words in found[0]
    assert load_file(path)["rank"].item() == 0  # the earlier file
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_in_the_way_fails_on_every_rank(cluster, tmp_path):
    found = set(cluster.run(_save, str(tmp_path)))
    assert len(found) == 1 and str(tmp_path) in found.pop()
    (tmp_path / "file").touch()
    found = set(cluster.run(_save, str(tmp_path / "file" / "x")))
    assert len(found) == 1 and "file" in found.pop()
    assert os.listdir(tmp_path) == ["file"]


def _save_per_node(ctx, folder):
    return _save(ctx.axis("node"), f"{folder}/{ctx.node_rank}", {"rank": torch.tensor(ctx.rank)})


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)], ids=["one node", "two nodes"])
def test_once_per_machine(pair, tmp_path, nodes):
    assert pair.run(_on_nodes, nodes, _save_per_node, str(tmp_path)) == ["saved"] * 2
    found = {int(name): load_file(tmp_path / name)["rank"].item() for name in os.listdir(tmp_path)}
    assert found == ({0: 0} if nodes == (0, 0) else {0: 0, 1: 1})
