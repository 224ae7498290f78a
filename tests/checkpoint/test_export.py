"""Exporting models: the files, what is refused, and exports over an earlier one."""

import contextlib
import errno
import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import fxtrain as fx
from fxtrain.models import export, load_model
from fxtrain.models.folder import INDEX, SINGLE
from tests._errors import raises_code
from tests._slow import slow_after
from tests.checkpoint._exports import (
    DTYPES,
    Holder,
    Tied,
    as_the_ecosystem_reads,
    assert_same,
    full_disk,
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
    with raises_code("FX200", "max_shard"):
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
    with raises_code("FX600", "x19", "5 more"):
        export({f"x{i}": i for i in range(25)}, tmp_path)


def test_a_model_or_tensors_by_name_are_taken(tmp_path):
    with raises_code("FX600", "torch.nn.Module", "list"):
        export([torch.ones(2)], tmp_path)
    with raises_code("FX600", "ctx is a str"):
        export(some_state(), tmp_path, ctx="cpu")
    with raises_code("FX600", str(tmp_path / "file")):
        (tmp_path / "file").write_text("")
        export(some_state(), tmp_path / "file")
    with raises_code("FX600", "'__metadata__'"):
        export({"__metadata__": torch.ones(1)}, tmp_path)
    with raises_code("FX600", "Unicode"):
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
    with raises_code("FX603"):
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


def test_nothing_of_an_earlier_export_remains_and_other_files_do(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "model-card.safetensors").write_text("mine too")
    for limit, weights in [(1, 5), (130, 3), ("5GB", 1), (130, 3), (130, 3), (1, 5), ("5GB", 1)]:
        state = some_state(seed=weights)
        export(state, tmp_path, limit)
        index = [INDEX] if weights > 1 else []
        found = names_in(tmp_path)
        assert len(found) == weights + len(index) + 2, found
        assert {"README.md", "model-card.safetensors", *index} <= set(found)
        assert_same(as_the_ecosystem_reads(tmp_path), state)
        assert_same(loaded(tmp_path, state), state)


class _Killed(BaseException):
    """Stands for the end of the process: nothing after it reaches the disk."""


CHANGES = ["replace", "link", "unlink", "rmdir", "mkdir"]


def _dying_after(patch, steps):
    """Let so many changes to the disk through; from then on every one fails."""
    left = [steps]

    def guard(real):
        def call(*args, **kwargs):
            if left[0] <= 0:
                raise _Killed
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for name in CHANGES:
        patch.setattr(os, name, guard(getattr(os, name)))
    return left


@pytest.mark.parametrize(
    ("before", "after"),
    slow_after(4, [("5GB", "5GB"), ("5GB", 130), (130, "5GB"), (130, 130), (130, 1), (1, 130)]),
)
def test_a_kill_at_any_moment_leaves_one_export_whole(tmp_path, monkeypatch, before, after):
    old, new = some_state(seed=1), some_state(seed=2)
    seen = []
    for step in range(200):
        folder = tmp_path / str(step)
        export(old, folder, before)
        with monkeypatch.context() as patch:
            left = _dying_after(patch, step)
            with contextlib.suppress(_Killed):
                export(new, folder, after)
        for read in (as_the_ecosystem_reads, lambda folder: dict(loaded(folder, old))):
            found = read(folder)
            is_new = torch.equal(found["w0"], new["w0"])
            assert_same(found, new if is_new else old)
        seen.append(is_new)
        # The next export finishes and cleans up, whatever was left.
        export(new, folder, after)
        count = 1 if after == "5GB" else {130: 3, 1: 5}[after] + 1
        assert len(names_in(folder)) == count, names_in(folder)
        assert_same(as_the_ecosystem_reads(folder), new)
        shutil.rmtree(folder)
        if left[0] > 0:
            break
    assert step > 3 and seen[0] is False and seen[-1] is True
    assert seen == sorted(seen)  # one switch, never back


def test_a_first_export_that_is_killed_leaves_no_model(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        _dying_after(patch, 4)
        with pytest.raises(_Killed):
            export(some_state(), tmp_path / "new", 130)
    with raises_code("FX601"):
        load_model(tmp_path / "new", Holder(some_state()))


def test_a_file_system_without_links_gets_copies(tmp_path, failing):
    failing(os, "link", errno.EPERM)
    for seed in (1, 2):
        export(some_state(seed), tmp_path, 130)
        assert_same(as_the_ecosystem_reads(tmp_path), some_state(seed))
    assert len(names_in(tmp_path)) == 4


def test_a_full_disk_leaves_the_earlier_export(tmp_path, monkeypatch):
    export(some_state(1), tmp_path, 130)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full_disk("00002", 200))
        with raises_code("FX600", "No space left"):
            export(some_state(2), tmp_path, 130)
    assert_same(as_the_ecosystem_reads(tmp_path), some_state(1))
    assert len(names_in(tmp_path)) == 4  # and nothing lies about
