"""Exporting and loading models: the files, what is refused, ranks, interruptions."""

import contextlib
import errno
import json
import os
import shutil
import struct
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import export, load_model
from fxtrain.checkpoint._model_folder import INDEX, MARKER, SINGLE
from tests.checkpoint._ranks import ready

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def _names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def _as_the_ecosystem_reads(folder):
    """Tensors by name, found as transformers finds them."""
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return safetensors.torch.load_file(folder / SINGLE)
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: safetensors.torch.load_file(folder / name) for name in set(places.values())}
    return {name: files[file][name] for name, file in places.items()}


def _filled(folder, like):
    """What load_model makes of a folder, in fresh tensors."""
    module = _Holder({name: torch.zeros_like(tensor) for name, tensor in like.items()})
    load_model(folder, module)
    return module.state_dict()


class _Holder(nn.Module):
    """A module with these tensors."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class _Tied(nn.Module):
    def __init__(self, **where):
        super().__init__()
        self.embed = nn.Embedding(6, 4, **where)
        self.body = nn.Linear(4, 4, **where)
        self.head = nn.Linear(4, 6, bias=False, **where)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def _same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].shape == other[name].shape, name
        bits = [
            t.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
            for t in (one[name], other[name])
        ]
        assert bits[0].numel() == 0 or torch.equal(*(t.view(torch.uint8) for t in bits)), name


def _state(seed=0, count=5):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(4, 4, generator=generator) for i in range(count)}


# ---------------------------------------------------------------- files


def test_one_file_or_several_with_an_index(tmp_path):
    state = _state()
    assert export(state, tmp_path) == (tmp_path / SINGLE,)
    assert _names(tmp_path) == [SINGLE]
    _same(_as_the_ecosystem_reads(tmp_path), state)
    with safetensors.safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    files = export(state, tmp_path, max_shard=130)  # two of 64 bytes each
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [file.name for file in files] == shards
    assert _names(tmp_path) == [*shards, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 5 * 64}
    assert index["weight_map"] == {f"w{i}": shards[i // 2] for i in range(5)}
    _same(_as_the_ecosystem_reads(tmp_path), state)
    _same(_filled(tmp_path, state), state)
    _same(_filled(tmp_path / INDEX, state), state)


@pytest.mark.parametrize(
    ("size", "files"),
    [("1KB", 1), (" 0.25 kib ", 2), ("192B", 2), (191, 3), (1, 5), ("5GB", 1), ("1TiB", 1)],
)
def test_sizes_of_files(tmp_path, size, files):
    assert len(export(_state(), tmp_path, size)) == files


@pytest.mark.parametrize("size", ["5", "GB", "-1MB", 0, -1, 2.5, True, None, "0B"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(fx.CheckpointError, match="max_shard"):
        export(_state(), tmp_path, size)


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
        _same(_as_the_ecosystem_reads(tmp_path), {k: v.resolve_neg() for k, v in state.items()})
        _same(_filled(tmp_path, {k: v.resolve_neg().contiguous() for k, v in state.items()}), state)


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
        (nn.UninitializedParameter(), "bad is not initialised"),
    ],
)
def test_what_the_format_cannot_hold_is_named(tmp_path, value, words):
    export(_state(), tmp_path)
    with pytest.raises(fx.CheckpointError, match=words):
        export({"good": torch.ones(2), "bad": value}, tmp_path)
    _same(_as_the_ecosystem_reads(tmp_path), _state())


def test_many_bad_leaves_are_counted(tmp_path):
    with pytest.raises(fx.CheckpointError, match=r"x9 is a int.*\n  and 5 more"):
        export({f"x{i}": i for i in range(15)}, tmp_path)


def test_a_model_or_tensors_by_name_are_taken(tmp_path):
    with pytest.raises(fx.CheckpointError, match=r"fx.wrap returned or a torch.nn.Module.* list"):
        export([torch.ones(2)], tmp_path)
    with pytest.raises(fx.CheckpointError, match="ctx is a str"):
        export(_state(), tmp_path, ctx="cpu")
    with pytest.raises(fx.CheckpointError, match="is a file"):
        (tmp_path / "file").write_text("")
        export(_state(), tmp_path / "file")
    with pytest.raises(fx.CheckpointError, match="'__metadata__' is taken"):
        export({"__metadata__": torch.ones(1)}, tmp_path)
    with pytest.raises(fx.CheckpointError, match="is not text a file can hold"):
        export({"\ud800": torch.ones(1)}, tmp_path)


def test_tied_tensors_are_stored_once_under_any_of_their_names(tmp_path):
    net = _Tied()
    export(net, tmp_path)
    stored = _as_the_ecosystem_reads(tmp_path)
    assert sorted(stored) == ["body.bias", "body.weight", "embed.weight"]
    with safetensors.safe_open(tmp_path / SINGLE, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    for reader in (safetensors.torch.load_model, lambda m, f: load_model(f, m)):
        other = _Tied()
        reader(other, tmp_path / SINGLE)
        _same(other.state_dict(), net.state_dict())
        assert other.head.weight is other.embed.weight
    loose = _Tied()
    loose.head.weight = nn.Parameter(torch.zeros(6, 4))
    load_model(tmp_path, loose)  # by the file's own word on what else the tensor is called
    _same(loose.state_dict(), net.state_dict())
    load_model({n: t for n, t in net.state_dict().items() if n != "embed.weight"}, other)
    _same(other.state_dict(), net.state_dict())


def test_one_tensor_is_not_filled_from_two(tmp_path):
    loose = _Tied()
    loose.head.weight = nn.Parameter(torch.zeros(6, 4))
    export(loose, tmp_path)
    net = _Tied()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(fx.CheckpointError, match=r"two in the source:\n.*embed.weight and head"):
        load_model(tmp_path, net)
    _same(net.state_dict(), before)
    loose.head.weight.data.copy_(loose.embed.weight.data)
    export(loose, tmp_path)
    load_model(tmp_path, net)
    _same(net.state_dict(), loose.state_dict())


def test_views_that_overlap_are_stored_apart(tmp_path):
    base = torch.arange(6.0)
    state = {"all": base, "head": base[:2], "same": base, "shaped": base.view(2, 3)}
    export(state, tmp_path)
    assert sorted(_as_the_ecosystem_reads(tmp_path)) == ["all", "head", "shaped"]
    _same(_filled(tmp_path, {k: v.clone() for k, v in state.items()}), state)


# ---------------------------------------------------------------- earlier exports


def test_nothing_of_an_earlier_export_remains_and_other_files_do(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "model-card.safetensors").write_text("mine too")
    for limit, weights in [(1, 5), (130, 3), ("5GB", 1), (130, 3), (130, 3), (1, 5), ("5GB", 1)]:
        state = _state(seed=weights)
        export(state, tmp_path, limit)
        index = [INDEX] if weights > 1 else []
        found = _names(tmp_path)
        assert len(found) == weights + len(index) + 2, found
        assert {"README.md", "model-card.safetensors", *index} <= set(found)
        _same(_as_the_ecosystem_reads(tmp_path), state)
        _same(_filled(tmp_path, state), state)


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
    [("5GB", "5GB"), ("5GB", 130), (130, "5GB"), (130, 130), (130, 1), (1, 130)],
)
def test_a_kill_at_any_moment_leaves_one_export_whole(tmp_path, monkeypatch, before, after):
    old, new = _state(seed=1), _state(seed=2)
    seen = []
    for step in range(200):
        folder = tmp_path / str(step)
        export(old, folder, before)
        with monkeypatch.context() as patch:
            left = _dying_after(patch, step)
            with contextlib.suppress(_Killed):
                export(new, folder, after)
        for read in (_as_the_ecosystem_reads, lambda folder: dict(_filled(folder, old))):
            found = read(folder)
            is_new = torch.equal(found["w0"], new["w0"])
            _same(found, new if is_new else old)
        seen.append(is_new)
        # The next export finishes and cleans up, whatever was left.
        export(new, folder, after)
        count = 1 if after == "5GB" else {130: 3, 1: 5}[after] + 1
        assert len(_names(folder)) == count, _names(folder)
        _same(_as_the_ecosystem_reads(folder), new)
        shutil.rmtree(folder)
        if left[0] > 0:
            break
    assert step > 3 and seen[0] is False and seen[-1] is True
    assert seen == sorted(seen)  # one switch, never back


def test_a_first_export_that_is_killed_leaves_no_model(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        _dying_after(patch, 4)
        with pytest.raises(_Killed):
            export(_state(), tmp_path / "new", 130)
    with pytest.raises(fx.CheckpointError, match="holds no model"):
        load_model(tmp_path / "new", _Holder(_state()))


def test_a_file_system_without_links_gets_copies(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for seed in (1, 2):
        export(_state(seed), tmp_path, 130)
        _same(_as_the_ecosystem_reads(tmp_path), _state(seed))
    assert len(_names(tmp_path)) == 4


def _full_disk(name_part, after):
    """An `open` whose files take so many bytes and then fail as a full disk does."""
    real = Path.open

    def opened(self, mode="r", *args, **kwargs):
        file = real(self, mode, *args, **kwargs)
        if "x" not in mode or name_part not in self.name:
            return file
        taken = [0]
        write = file.write

        def limited(data):
            taken[0] += len(data)
            if taken[0] > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(data)

        return _Limited(file, limited)

    return opened


class _Limited:
    def __init__(self, file, write):
        self._file = file
        self.write = write

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_leaves_the_earlier_export(tmp_path, monkeypatch):
    export(_state(1), tmp_path, 130)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", _full_disk("00002", 200))
        with pytest.raises(fx.CheckpointError, match="No space left"):
            export(_state(2), tmp_path, 130)
    _same(_as_the_ecosystem_reads(tmp_path), _state(1))
    assert len(_names(tmp_path)) == 4  # and nothing lies about


# ---------------------------------------------------------------- loading


def test_names_shapes_and_dtypes_that_do_not_fit_are_listed(tmp_path):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    state = net.state_dict()
    state["1.runing_mean"] = state.pop("1.running_mean")
    state["0.weight"] = torch.zeros(4, 2)
    state["0.bias"] = state["0.bias"].double()
    export(state, tmp_path)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(fx.CheckpointError) as caught:
        load_model(tmp_path, net)
    assert str(caught.value).splitlines() == [
        f"load_model: {tmp_path} does not fit Sequential.",
        "  1 missing from the source:",
        "    1.running_mean (nearest: 1.runing_mean)",
        "  1 not in the model:",
        "    1.runing_mean (nearest: 1.running_mean)",
        "  1 of another shape:",
        "    0.weight is [4, 2] in the source, [4, 3] in the model",
        "  1 of another dtype (cast=True converts):",
        "    0.bias is torch.float64 in the source, torch.float32 in the model",
    ]
    _same(net.state_dict(), before)  # nothing was touched
    with pytest.raises(fx.CheckpointError, match="another shape"):
        load_model(tmp_path, net, strict=False, cast=True)
    fixed = {**state, "0.weight": before["0.weight"]}
    found = load_model(fixed, net, strict=False, cast=True)
    assert (found.missing, found.unexpected) == (("1.running_mean",), ("1.runing_mean",))
    assert torch.equal(net[0].bias, state["0.bias"].float())


def test_long_lists_are_cut():
    with pytest.raises(fx.CheckpointError, match=r"30 missing(.*\n){11}    and 20 more"):
        load_model({}, _Holder({f"w{i}": torch.ones(1) for i in range(30)}))


def test_a_prefix_is_suggested_and_used():
    state = {f"model.{name}": tensor for name, tensor in _state().items()}
    with pytest.raises(fx.CheckpointError, match=r"pass prefix='model\.'"):
        load_model(state, _Holder(_state(9)))
    holder = _Holder(_state(9))
    load_model(state | {"other.x": torch.ones(1)}, holder, prefix="model.")
    _same(holder.state_dict(), _state())
    inner = nn.ModuleDict({"model": _Holder(_state(9))})
    with pytest.raises(fx.CheckpointError, match=r"rename=lambda name: 'model\.' \+ name"):
        load_model(_state(), inner)
    load_model(_state(), inner, rename=lambda name: "model." + name)
    _same(inner.state_dict(), state)


def test_rename_maps_names_and_leaves_out():
    holder = _Holder({"a": torch.zeros(4, 4)})
    load_model(_state(), holder, rename=lambda name: {"w1": "a"}.get(name))
    assert torch.equal(holder.a, _state()["w1"])
    with pytest.raises(fx.CheckpointError, match="'w0' and 'w1' of the state dict are both"):
        load_model(_state(), holder, rename=lambda _: "a")


def test_parameters_are_filled_in_place(tmp_path):
    net, other = nn.Linear(8, 8), nn.Linear(8, 8)
    export(net, tmp_path)
    places = [parameter.data_ptr() for parameter in other.parameters()]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    load_model(tmp_path, other)
    _same(other.state_dict(), net.state_dict())
    assert [parameter.data_ptr() for parameter in other.parameters()] == places
    assert optimizer.param_groups[0]["params"][0] is other.weight
    assert other.weight.requires_grad and other.weight.grad is None


def test_a_module_on_the_meta_device_is_given_memory(tmp_path):
    net = _Tied()
    export(net, tmp_path)
    other = _Tied(device="meta")
    other.body.bias.requires_grad_(False)
    other.body.bias.mark = "kept"
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    load_model(tmp_path, other)
    _same(other.state_dict(), net.state_dict())
    assert other.head.weight is other.embed.weight
    assert not other.body.bias.requires_grad and other.body.bias.mark == "kept"
    other(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert not torch.equal(other.embed.weight, net.embed.weight)


def test_a_buffer_that_is_never_stored_needs_values_of_its_own():
    net = nn.Linear(2, 2, device="meta")
    net.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    values = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    with pytest.raises(fx.CheckpointError, match=r"never stored.*:\n    table"):
        load_model(values, net)
    net.table = torch.ones(2)
    load_model(values, net)
    assert torch.equal(net.weight, torch.ones(2, 2)) and not net.weight.is_meta
    partly = nn.Linear(2, 2, device="meta")
    assert load_model({"bias": torch.ones(2)}, partly, strict=False).missing == ("weight",)
    assert partly.weight.is_meta and torch.equal(partly.bias, torch.ones(2))


class _Extra(nn.Linear):
    """Keeps something that is neither a parameter nor a buffer."""

    extra = torch.zeros(3)

    def get_extra_state(self):
        return self.extra.clone()

    def set_extra_state(self, state):
        self.extra = state


def test_state_that_a_module_makes_itself_goes_back_through_it(tmp_path):
    net, other = _Extra(2, 2), _Extra(2, 2)
    net.extra = torch.arange(3.0)
    export(net, tmp_path)
    load_model(tmp_path, other)
    _same(other.state_dict(), net.state_dict())


def test_wrapping_and_compiling_change_no_names(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = dict(net.state_dict())
    inner = nn.Sequential(torch.compile(net[0]), net[1])
    with fx.detect({}, device="cpu") as ctx:
        wrapped = fx.wrap(net, ctx)
        for model in (net, torch.compile(net), inner, wrapped):
            export(model, tmp_path)
            _same(_as_the_ecosystem_reads(tmp_path), plain)
            load_model(tmp_path, model)
            load_model({name: tensor * 2 for name, tensor in plain.items()}, model)
            assert torch.equal(net[0].weight, _as_the_ecosystem_reads(tmp_path)["0.weight"] * 2)
            load_model(tmp_path, model)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("gpt2-that-is-nowhere", "neither a file nor a folder"),
        (3, "found int"),
        ({"model": {"w": torch.ones(1)}, "epoch": 3}, "other things under 'model', 'epoch'"),
        ({1: torch.ones(1)}, "should map names"),
    ],
)
def test_a_source_that_is_none_is_named(source, words):
    with pytest.raises(fx.CheckpointError, match=words):
        load_model(source, nn.Linear(1, 1))


def test_pickles_are_read_as_far_as_weights_only_allows(tmp_path):
    state = _state()
    torch.save(state, tmp_path / "pytorch_model.bin")
    _same(_filled(tmp_path, state), state)
    _same(_filled(tmp_path / "pytorch_model.bin", state), state)
    torch.save({"state_dict": state, "epoch": 2}, tmp_path / "run.pt")
    with pytest.raises(fx.CheckpointError, match="under 'state_dict', 'epoch'"):
        load_model(tmp_path / "run.pt", _Holder(state))
    torch.save(_Holder(state), tmp_path / "whole.pt")
    with pytest.raises(fx.CheckpointError, match=r"weights_only=True, mmap=True.* refuses"):
        load_model(tmp_path / "whole.pt", _Holder(state))
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(fx.CheckpointError, match="refuses"):
        load_model(tmp_path / "old.pt", _Holder(state))
    (tmp_path / "short.bin").write_bytes((tmp_path / "run.pt").read_bytes()[:100])
    with pytest.raises(fx.CheckpointError, match="refuses"):
        load_model(tmp_path / "short.bin", _Holder(state))
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(fx.CheckpointError, match=r"ends in \.safetensors"):
        load_model(tmp_path / "model.onnx", _Holder(state))


# ---------------------------------------------------------------- hostile files


def _write_header(path, header, body=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + body)


def _one(**changes):
    return {"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes}


HOSTILE = {
    "empty": (b"", None, "do not hold a header"),
    "giant header": (b"{}", 10**15, "do not hold a header"),
    "longest header": (b"{}", 2**64 - 1, "do not hold a header"),
    "not JSON": (b"{nope", None, "not the JSON"),
    "not UTF-8": (b"\xff\xfe", None, "not the JSON"),
    "a list": ([], None, "not an object"),
    "deep nesting": (b"[" * 200_000, None, "not the JSON"),
    "a name twice": (b'{"w": {}, "w": {}}', None, "'w' appears twice"),
    "no fields": ({"w": {}}, None, "has the fields"),
    "more fields": (_one(extra=1), None, "has the fields"),
    "a dtype": (_one(dtype="Q4"), None, "'Q4' of 'w'"),
    "no dtype": (_one(dtype=["U8"]), None, "of 'w' is not one"),
    "negative shape": (_one(shape=[-4]), None, "shape of 'w'"),
    "a shape of truth": (_one(shape=[True] * 4), None, "shape of 'w'"),
    "a shape of text": (_one(shape="4"), None, "shape of 'w'"),
    "many dimensions": (_one(shape=[4] + [1] * 64), None, "shape of 'w'"),
    "absurd shape": (_one(shape=[2**62, 2**62]), None, "needs"),
    "absurd shape of nothing": (_one(shape=[2**62, 0]), None, "needs 0 bytes"),
    "negative offset": (_one(data_offsets=[-4, 0]), None, "offsets of 'w'"),
    "backward": (_one(data_offsets=[4, 0]), None, "needs 4 bytes"),
    "three offsets": (_one(data_offsets=[0, 4, 4]), None, "offsets of 'w'"),
    "float offsets": (_one(data_offsets=[0.0, 4.0]), None, "offsets of 'w'"),
    "behind the end": (_one(data_offsets=[100, 104]), None, "leaves a gap"),
    "too long": (_one(shape=[5], data_offsets=[0, 5]), None, "room for 4"),
    "too short": (_one(shape=[3], data_offsets=[0, 3]), None, "room for 4"),
    "overlap": (_one() | {"v": _one()["w"]}, None, "overlaps"),
    "metadata": (_one() | {"__metadata__": {"a": 1}}, None, "something else than text"),
    "metadata list": (_one() | {"__metadata__": []}, None, "not an object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_an_error(tmp_path, name):
    header, length, words = HOSTILE[name]
    path = tmp_path / SINGLE
    if name == "empty":
        path.write_bytes(b"")
    else:
        _write_header(path, header, b"\1\2\3\4", length)
    with pytest.raises(fx.CheckpointError, match=words):
        load_model(path, _Holder({"w": torch.zeros(4, dtype=torch.uint8)}))


def test_the_same_header_without_the_fault_is_read(tmp_path):
    _write_header(tmp_path / SINGLE, _one(), b"\1\2\3\4")
    holder = _Holder({"w": torch.zeros(4, dtype=torch.uint8)})
    load_model(tmp_path, holder)
    assert holder.w.tolist() == [1, 2, 3, 4]


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(fx.CheckpointError, match="not a regular file"):
        load_model(tmp_path / SINGLE, nn.Linear(1, 1))


def _index(folder, places):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize(
    "name",
    ["../out.safetensors", "/etc/out.safetensors", "a/../../out.safetensors", "..", "", ".",
     "C:\\out.safetensors", "..\\out.safetensors", "link.safetensors", "linked/out.safetensors"],
)  # fmt: skip
def test_an_index_names_files_inside_its_folder_only(tmp_path, name):
    safetensors.torch.save_file(_state(count=1), tmp_path / "out.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    (folder / "linked").symlink_to(tmp_path)
    _index(folder, {"w0": name})
    with pytest.raises(fx.CheckpointError, match=r"out of the folder|outside the folder"):
        load_model(folder, _Holder(_state(count=1)))
    (folder / SINGLE).symlink_to(tmp_path / "out.safetensors")
    (folder / INDEX).unlink()
    with pytest.raises(fx.CheckpointError, match="outside the folder"):
        load_model(folder, _Holder(_state(count=1)))


def test_the_cache_of_a_hub_is_read_through_its_links(tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    safetensors.torch.save_file(_state(), blobs / "0f1e")
    (snapshot / "a.safetensors").symlink_to("../../blobs/0f1e")
    _index(snapshot, dict.fromkeys(_state(), "a.safetensors"))
    _same(_filled(snapshot, _state()), _state())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "not an object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"w0": 3}}', "no weight_map"),
        ('{"weight_map": {"w0": "a", "w0": "b"}}', "appears twice"),
        ('{"weight_map": {"w0": "absent.safetensors"}}', "absent.safetensors is not there"),
        ('{"weight_map": {"w7": "a.safetensors"}}', "the index says that 'w7' is here"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, words):
    safetensors.torch.save_file(_state(), tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(fx.CheckpointError, match=words):
        load_model(tmp_path, _Holder(_state()))


def test_only_what_the_index_lists_is_read(tmp_path):
    safetensors.torch.save_file(_state(), tmp_path / "a.safetensors")
    _index(tmp_path, {"w0": "a.safetensors"})
    with pytest.raises(fx.CheckpointError, match="4 missing"):
        load_model(tmp_path, _Holder(_state()))


def test_two_models_in_one_folder_are_told_apart(tmp_path):
    safetensors.torch.save_file(_state(1), tmp_path / "a.safetensors")
    _index(tmp_path, dict.fromkeys(_state(), "a.safetensors"))
    safetensors.torch.save_file(_state(2), tmp_path / SINGLE)
    with pytest.raises(fx.CheckpointError, match="holds both"):
        load_model(tmp_path, _Holder(_state()))
    _same(_filled(tmp_path / SINGLE, _state()), _state(2))
    _same(_filled(tmp_path / INDEX, _state()), _state(1))
    (tmp_path / MARKER).write_text("")  # an export was interrupted here
    _same(_filled(tmp_path, _state()), _state(2))


def test_a_folder_without_a_model_says_what_it_holds(tmp_path):
    (tmp_path / "weights.safetensors").write_text("")
    with pytest.raises(fx.CheckpointError, match=r"holds no model.*weights\.safetensors"):
        load_model(tmp_path, nn.Linear(1, 1))


# ---------------------------------------------------------------- ranks


def _spread(ctx, mesh_shape, seed=0):
    """A state with tensors laid out over a mesh in every way, and the same in one place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    ways = [Replicate(), Shard(0), Shard(1)]
    generator = torch.Generator().manual_seed(seed)
    layouts = [[one] for one in ways]
    if len(mesh_shape) == 2:
        layouts = [[one, two] for one in ways for two in ways]
    whole, parts = {"plain": torch.arange(5.0) + seed}, {"plain": torch.arange(5.0) + seed}
    for place, layout in enumerate(layouts):
        for shape in ((8, 4), (5, 3), (1, 2)):
            name = f"w{place}_{shape[0]}"
            whole[name] = torch.randn(shape, generator=generator).to(
                torch.bfloat16 if place % 2 else torch.float32
            )
            parts[name] = distribute_tensor(whole[name], mesh, layout)
    return whole, parts


def _export_spread(ctx, mesh_shape, folder, limit, sharded, seed=0):
    whole, parts = _spread(ctx, mesh_shape, seed)
    alive, most, mine = weakref.WeakSet(), [0], []

    def watch(tensor):
        full = real(tensor)
        if full is not tensor and hasattr(tensor, "placements"):
            alive.add(full)
            most[0] = max(most[0], len(alive))
        return full

    from fxtrain.checkpoint import _export

    def written(path, *args):
        mine.append(path.name)
        return real_write(path, *args)

    real, _export._whole = _export._whole, watch
    real_write, _export._write_file = _export._write_file, written
    try:
        files = export(parts, folder, limit, ctx=ctx, sharded=sharded)
    finally:
        _export._whole, _export._write_file = real, real_write
    return [file.name for file in files], most[0], whole, mine


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
@pytest.mark.parametrize("sharded", [False, True])
def test_spread_tensors_are_gathered_one_by_one(clusters, tmp_path, ranks, mesh, sharded):
    for limit in ("5GB", 200, 1):
        found = ready(clusters[ranks]).run(_export_spread, mesh, tmp_path, limit, sharded)
        names, _, whole, _ = found[0]
        assert all(answer[0] == names for answer in found)
        turns = ranks if sharded else 1
        for rank, answer in enumerate(found):
            assert answer[3] == (names[rank::turns] if rank < turns else [])
        # One that arrives and, on the rank that writes it, one that is being written.
        assert max(answer[1] for answer in found) <= 2
        assert len(names) == (1 if limit == "5GB" else len(names))
        _same(_as_the_ecosystem_reads(tmp_path), whole)
        assert set(_names(tmp_path)) == {*names, *([INDEX] if len(names) > 1 else [])}
    assert len(names) == len(whole)


def _load_spread(ctx, mesh_shape, folder):
    """Fill spread tensors from a folder; the rows that were read, and whether all fits."""
    whole, parts = _spread(ctx, mesh_shape)
    _, other = _spread(ctx, mesh_shape, seed=1)
    read = {}

    class Watched:
        def __init__(self, *args, **kwargs):
            self._file = safetensors.safe_open(*args, **kwargs)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def get_tensor(self, name):
            read[name] = self._file.get_tensor(name)
            return read[name]

        def get_slice(self, name):
            rows = self._file.get_slice(name)

            class Rows:
                def __getitem__(self, at):
                    read[name] = rows[at]
                    return read[name]

            return Rows()

    from fxtrain.checkpoint import _model_source

    real, _model_source.safe_open = _model_source.safe_open, Watched
    try:
        holder = _Holder(other)
        load_model(folder, holder, ctx=ctx)
    finally:
        _model_source.safe_open = real
    state = holder.state_dict()
    for name, tensor in parts.items():
        if name == "plain":
            assert torch.equal(state[name], whole[name])
            continue
        local = tensor.to_local()
        assert torch.equal(state[name].to_local(), local), name
        assert state[name].placements == tensor.placements
        assert read[name].numel() == local.numel() if name in read else local.numel() == 0, name
    return sorted(read)


@pytest.mark.parametrize(("ranks", "mesh"), [(2, (2,)), (4, (4,)), (4, (2, 2))])
def test_a_rank_reads_its_own_part_only(clusters, tmp_path, ranks, mesh):
    ready(clusters[ranks]).run(_export_spread, mesh, tmp_path, 200, False)
    ready(clusters[ranks]).run(_load_spread, mesh, tmp_path)


def _told(call, *args, **kwargs):
    """The kind and words of an fxtrain error; raising it would end the pool's ranks."""
    try:
        call(*args, **kwargs)
    except fx.FxError as error:
        return type(error).__name__, str(error)


def _other_than_rank_0(ctx, folder):
    return _told(export, {"w": torch.ones(2 + ctx.rank)}, folder, ctx=ctx)


def _breaks(ctx, folder, broken, sharded):
    """One rank cannot write."""
    _, parts = _spread(ctx, (ctx.world_size,), seed=5)
    real = Path.open
    if ctx.rank == broken:
        Path.open = _full_disk("model", 400)
    try:
        return _told(export, parts, folder, 200, ctx=ctx, sharded=sharded)
    finally:
        Path.open = real


@pytest.mark.parametrize(("broken", "sharded"), [(0, False), (0, True), (1, True)])
def test_all_ranks_raise_what_one_of_them_met(pair, tmp_path, broken, sharded):
    names, _, whole, _ = ready(pair).run(_export_spread, (2,), tmp_path, 200, False)[0]
    one, other = ready(pair).run(_breaks, tmp_path, broken, sharded)
    assert one == other and one[0] == "CheckpointError" and "No space left" in one[1]
    assert set(_names(tmp_path)) == {*names, INDEX}
    _same(_as_the_ecosystem_reads(tmp_path), whole)


def test_ranks_with_different_models_are_told(pair, tmp_path):
    one, other = ready(pair).run(_other_than_rank_0, tmp_path)
    assert one[0] == other[0] == "CollectiveError"
    assert "different values" in one[1] and _names(tmp_path) == []


def _bad_on_one(ctx, folder):
    state = {"w": torch.ones(2), "x": 3 if ctx.rank else torch.ones(1)}
    return _told(export, state, folder, ctx=ctx)


def _load_bad_on_one(ctx, folder):
    source = folder if ctx.rank == 0 else folder / "absent"
    return _told(load_model, source, _Holder(_state()), ctx=ctx)


def test_an_error_of_one_rank_is_that_of_all(pair, tmp_path):
    one, other = ready(pair).run(_bad_on_one, tmp_path)
    assert one == other and one[0] == "CheckpointError" and "x is a int" in one[1]
    export(_state(), tmp_path)
    one, other = ready(pair).run(_load_bad_on_one, tmp_path)
    assert one == other and one[0] == "CheckpointError" and "absent" in one[1]


def _alone_with_spread(ctx, folder):
    return _told(export, _spread(ctx, (ctx.world_size,))[1], folder)


def test_spread_tensors_need_the_ranks(pair, tmp_path):
    for _, words in ready(pair).run(_alone_with_spread, tmp_path):
        assert "w0_8 is spread over ranks" in words


def _wrapped(ctx, folder, seed):
    torch.manual_seed(seed)
    with torch.random.fork_rng():
        model = fx.wrap(_Tied(), ctx)
    export(model, folder, 50)
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def _load_wrapped(ctx, folder):
    model = fx.wrap(_Tied(), ctx)
    load_model(folder, model)
    return dict(model.module.state_dict())


def test_a_wrapped_model_round_trips(cluster, tmp_path):
    state = ready(cluster).run(_wrapped, tmp_path, 3)[0]
    for found in ready(cluster).run(_load_wrapped, tmp_path):
        _same(found, state)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def _sharded_net(ctx, seed, *, meta=False, tensor=1):
    """Blocks under FSDP2, and tensor parallelism inside it where asked."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(
        "cpu", (ctx.world_size // tensor, tensor), mesh_dim_names=("shard", "tensor")
    )
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        net = nn.Sequential(*[_Block() for _ in range(3)])
    for block in net:
        if tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["shard"])
    return fully_shard(net, mesh=mesh["shard"])


def _export_sharded(ctx, folder, tensor):
    net = _sharded_net(ctx, 3, tensor=tensor)
    net(torch.ones(2, 6))  # a forward leaves the root's own parameters whole
    export(net, folder, 600, ctx=ctx)


def _load_sharded(ctx, folder, tensor, meta):
    net = _sharded_net(ctx, 4, meta=meta, tensor=tensor)
    load_model(folder, net, ctx=ctx)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net(torch.ones(2, 6))
    again = {name: value.full_tensor() for name, value in net.state_dict().items()}
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return before.detach(), again, net(torch.ones(2, 6)).detach()


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 1), (4, 2)])
def test_fsdp2_modules_round_trip(clusters, tmp_path, ranks, tensor):
    torch.manual_seed(3)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    ready(clusters[ranks]).run(_export_sharded, tmp_path, tensor)
    _same(_as_the_ecosystem_reads(tmp_path), net.state_dict())
    for meta in (False, True):
        for before, again, after in ready(clusters[ranks]).run(
            _load_sharded, tmp_path, tensor, meta
        ):
            torch.testing.assert_close(before, net(torch.ones(2, 6)))
            _same(again, net.state_dict())
            assert not torch.equal(before, after)


def _tied_under_fsdp2(ctx, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    torch.manual_seed(0)
    export(fully_shard(_Tied(), mesh=mesh), folder, ctx=ctx)
    nets = [fully_shard(_Tied(), mesh=mesh), fully_shard(_Tied(device="meta"), mesh=mesh)]
    by_hand = _Tied(device="meta")
    by_hand.body.weight = nn.Parameter(distribute_tensor(by_hand.body.weight, mesh, [Shard(0)]))
    for net in (*nets, by_hand):
        load_model(folder, net, ctx=ctx)
        assert net.head.weight is net.embed.weight
        net(torch.tensor([1])) if net is not by_hand else None
    states = [net.state_dict() for net in (*nets, by_hand)]
    return [
        {k: v.full_tensor() if hasattr(v, "placements") else v for k, v in state.items()}
        for state in states
    ]


def test_tied_weights_stay_tied_under_fsdp2(pair, tmp_path):
    torch.manual_seed(0)
    net = _Tied()
    for states in ready(pair).run(_tied_under_fsdp2, tmp_path):
        assert len(states) == 3
        for state in states:
            _same(state, net.state_dict())
    assert sorted(_as_the_ecosystem_reads(tmp_path)) == ["body.bias", "body.weight", "embed.weight"]


def test_what_deepspeed_has_partitioned_is_named(tmp_path):
    net = nn.Linear(2, 2)
    export(net, tmp_path)
    net.weight.ds_id = 0  # as DeepSpeed marks the parameters that it has taken apart
    with pytest.raises(fx.CheckpointError, match="weight is partitioned by DeepSpeed"):
        export(net, tmp_path)
    with pytest.raises(fx.CheckpointError, match="weight is partitioned by DeepSpeed"):
        load_model(tmp_path, net)


def _plan(mode, shard):
    strategy = fx.FSDP(mode=mode, shard=shard, wrap=("_Block",), ignore=("2.down.*",))
    return fx.Plan(strategy=strategy, precision="bf16")


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _train_and_export(ctx, folder, mode, shard):
    torch.manual_seed(3)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    model = fx.wrap(net, ctx, _plan(mode, shard), optimizer=_sgd)
    fns = fx.StepFns(model=model, loss=lambda m, batch: m(batch[0]).square().mean())
    loader = fx.shard(torch.utils.data.DataLoader([(torch.ones(6),)] * 8, batch_size=2), ctx)
    for batch in loader:
        fx.step(ctx, batch, fns)
    export(model, folder, 600)
    with torch.no_grad():
        return model(torch.ones(2, 6))


def _load_and_run(ctx, folder, mode, shard):
    torch.manual_seed(4)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    model = fx.wrap(net, ctx, _plan(mode, shard), optimizer=_sgd)
    with torch.no_grad():
        model(torch.ones(2, 6))  # leaves parameters whole where the mode says so
        load_model(folder, model)
        return model(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("ranks", "mode", "shard"),
    [(2, "grads_and_optimizer", None), (2, "none", None), (4, "full", 2)],
)
def test_a_wrapped_sharded_model_goes_to_any_other(clusters, tmp_path, ranks, mode, shard):
    wanted = ready(clusters[ranks]).run(_train_and_export, tmp_path, mode, shard)
    for other, again, part in ((2, "grads_and_optimizer", None), (4, "full", 2)):
        for found in ready(clusters[other]).run(_load_and_run, tmp_path, again, part):
            torch.testing.assert_close(found, wanted[0], rtol=0.02, atol=0.02)
    net = nn.Sequential(*[_Block() for _ in range(3)])
    start = net(torch.ones(2, 6))
    load_model(tmp_path, net)
    assert all(parameter.dtype is torch.float32 for parameter in net.parameters())
    torch.testing.assert_close(net(torch.ones(2, 6)), wanted[0].float(), rtol=0.05, atol=0.05)
    assert not torch.allclose(start, wanted[0].float(), rtol=0.05, atol=0.05)
