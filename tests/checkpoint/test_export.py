"""Exporting models: the files, and what is refused."""

import json
import struct

import pytest
import safetensors.torch
import torch
from torch import nn

import fxtrain as fx
from fxtrain.models import export, load_model
from fxtrain.models.folder import INDEX, SINGLE
from tests.checkpoint._exports import (
    DTYPES,
    Tied,
    as_the_ecosystem_reads,
    assert_same,
    loaded,
    names_in,
    some_state,
)


def test_one_file_or_several_with_an_index(tmp_path):
    state = some_state()
    assert export(state, tmp_path) == (tmp_path / SINGLE,)
    assert names_in(tmp_path) == [SINGLE]
    assert_same(as_the_ecosystem_reads(tmp_path), state)
    with safetensors.safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    files = export(state, tmp_path, max_shard=130)  # two of 64 bytes each
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [file.name for file in files] == shards
    assert names_in(tmp_path) == [*shards, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 5 * 64}
    assert index["weight_map"] == {f"w{i}": shards[i // 2] for i in range(5)}
    assert_same(as_the_ecosystem_reads(tmp_path), state)
    assert_same(loaded(tmp_path, state), state)
    assert_same(loaded(tmp_path / INDEX, state), state)


@pytest.mark.parametrize(
    ("size", "files"),
    [("1KB", 1), (" 0.25 kib ", 2), ("192B", 2), (191, 3), (1, 5), ("5GB", 1), ("1TiB", 1)],
)
def test_sizes_of_files(tmp_path, size, files):
    assert len(export(some_state(), tmp_path, size)) == files


@pytest.mark.parametrize("size", ["GB", "-1MB", 0, -1, True, "0B"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(fx.PlanError, match="max_shard"):
        export(some_state(), tmp_path, size)


def test_every_kind_of_tensor(tmp_path):
    base = torch.arange(24).reshape(4, 6)
    state = {f"d{i}": (base % 2).to(dtype) for i, dtype in enumerate(DTYPES)}
    state |= {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(3, 2),
        "view": base[1:3],
        "overlap": base[2:4],
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "nothing": torch.empty(2, 0, 2, dtype=torch.int8),
        "conjugated": torch.view_as_real(torch.tensor([1 + 2j]).conj().resolve_conj()),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "nan": torch.tensor([float("nan"), float("inf")]),
    }
    for limit in (1, 100, "5GB"):
        export(state, tmp_path, limit)
        assert_same(
            as_the_ecosystem_reads(tmp_path), {k: v.resolve_neg() for k, v in state.items()}
        )
        assert_same(
            loaded(tmp_path, {k: v.resolve_neg().contiguous() for k, v in state.items()}), state
        )


def test_values_start_where_their_dtype_may_be_read(tmp_path):
    state = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(1, dtype=torch.float64)}
    export(state, tmp_path)
    raw = (tmp_path / SINGLE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 8 == 0 and header["b"]["data_offsets"][0] % 8 == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2, dtype=torch.complex64), "bad is complex"),
        (torch.ones(2).to_sparse(), "bad is a torch.sparse_coo"),
        (torch.ones(2, device="meta"), "bad is on the meta device"),
        ("text", "bad is a str"),
        ({"deep": torch.ones(2)}, "bad is a dict"),
        (nn.UninitializedParameter(), "bad is not initialized"),
    ],
)
def test_what_the_format_cannot_hold_is_named(tmp_path, value, words):
    export(some_state(), tmp_path)
    with pytest.raises(fx.CheckpointError, match=words):
        export({"good": torch.ones(2), "bad": value}, tmp_path)
    assert_same(as_the_ecosystem_reads(tmp_path), some_state())


def test_many_bad_leaves_are_counted(tmp_path):
    with pytest.raises(fx.CheckpointError, match=r"x19 is a int.*\n  and 5 more problems"):
        export({f"x{i}": i for i in range(25)}, tmp_path)


def test_a_model_or_tensors_by_name_are_taken(tmp_path):
    with pytest.raises(
        fx.CheckpointError, match=r"a model from fx.wrap or a torch.nn.Module.* list"
    ):
        export([torch.ones(2)], tmp_path)
    with pytest.raises(fx.CheckpointError, match="ctx is a str"):
        export(some_state(), tmp_path, ctx="cpu")
    with pytest.raises(fx.CheckpointError, match="is a file"):
        (tmp_path / "file").write_text("")
        export(some_state(), tmp_path / "file")
    with pytest.raises(fx.CheckpointError, match="duplicate name '__metadata__'"):
        export({"__metadata__": torch.ones(1)}, tmp_path)
    with pytest.raises(fx.CheckpointError, match="is not valid Unicode"):
        export({"\ud800": torch.ones(1)}, tmp_path)


def test_tied_tensors_are_stored_once_under_any_of_their_names(tmp_path):
    net = Tied()
    export(net, tmp_path)
    stored = as_the_ecosystem_reads(tmp_path)
    assert sorted(stored) == ["body.bias", "body.weight", "embed.weight"]
    with safetensors.safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    for reader in (safetensors.torch.load_model, lambda m, f: load_model(f, m)):
        other = Tied()
        reader(other, tmp_path / SINGLE)
        assert_same(other.state_dict(), net.state_dict())
        assert other.head.weight is other.embed.weight
    loose = Tied()
    loose.head.weight = nn.Parameter(torch.zeros(6, 4))
    load_model(tmp_path, loose)  # by the file's own word on what else the tensor is called
    assert_same(loose.state_dict(), net.state_dict())
    load_model({n: t for n, t in net.state_dict().items() if n != "embed.weight"}, other)
    assert_same(other.state_dict(), net.state_dict())


def test_one_tensor_is_not_filled_from_two(tmp_path):
    loose = Tied()
    loose.head.weight = nn.Parameter(torch.zeros(6, 4))
    export(loose, tmp_path)
    net = Tied()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(
        fx.CheckpointError, match=r"different in the source:\n.*embed.weight and head"
    ):
        load_model(tmp_path, net)
    assert_same(net.state_dict(), before)
    loose.head.weight.data.copy_(loose.embed.weight.data)
    export(loose, tmp_path)
    load_model(tmp_path, net)
    assert_same(net.state_dict(), loose.state_dict())


def test_views_that_overlap_are_stored_apart(tmp_path):
    base = torch.arange(6.0)
    state = {"all": base, "head": base[:2], "same": base, "shaped": base.view(2, 3)}
    export(state, tmp_path)
    assert sorted(as_the_ecosystem_reads(tmp_path)) == ["all", "head", "shaped"]
    assert_same(loaded(tmp_path, {k: v.clone() for k, v in state.items()}), state)
