"""Sizes of real modules, budgets, mappings by hand, and what is refused."""

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import fxtrain as fx
from fxtrain import big
from fxtrain.big import budgets
from fxtrain.state import read_record, write_record
from tests._errors import raises_code


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.inner = nn.Linear(width, width, bias=False)
        self.register_buffer("scale", torch.ones(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.bias = nn.Parameter(torch.zeros(3))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.attention = nn.MultiheadAttention(4, 2, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def names(sizes):
    return {unit.name: unit.bytes for unit in sizes.units}


def test_units_are_blocks_leaves_and_tensors_beside_modules():
    sizes = big.sizes(Net())
    assert names(sizes) == {
        "bias": 12, "embed": 160, "layers.0": 88, "layers.1": 88, "layers.2": 88,
        "attention": 256, "head": 0,
    }  # fmt: skip
    assert sizes.tied == (("embed.weight", "head.weight"),)
    assert sizes.bytes == 692 == sum(sizes.tensors.values())
    assert [unit.reads for unit in sizes.units if unit.name == "head"] == [160]
    assert sizes.units[2].buffers == 8 and sizes.units[2].kind == "Block"
    assert {"layers.0.gain", "layers.0.inner"} < set(names(big.sizes(Net(), no_split=())))
    assert big.sizes(Net) == sizes


def test_tensors_that_share_memory_are_one():
    net = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    net[1].weight = nn.Parameter(net[0].weight.data)
    assert big.sizes(net).tied == (("0.weight", "1.weight"),)


def test_dtypes_count():
    whole = big.sizes(Net())
    half = big.sizes(Net(), dtype="bfloat16", dtypes={"*gain": "float32"})
    assert half.bytes == (whole.bytes - 24) // 2 + 24 + 3 * 8  # buffers and gains stay
    for wrong in ({"dtype": "bf17"}, {"no_split": ("Blok",)}):
        with raises_code("FX200", "sizes"):
            big.sizes(Net(), **wrong)


def test_a_model_of_transformers_keeps_what_it_keeps_in_fp32():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    sizes = big.sizes(lambda: transformers.T5ForConditionalGeneration(config), dtype="float16")
    assert ("*wo*", "float32") in sizes.dtypes
    assert "T5Block" in {unit.kind for unit in sizes.units}


def test_files_without_classes_have_layers_by_their_numbers(tmp_path):
    net = Net()
    del net.head
    save_file(dict(net.named_parameters()), tmp_path / "model.safetensors")
    sizes = big.sizes(tmp_path)
    assert names(sizes)["layers.1"] == 80 and names(sizes)["bias"] == 12
    assert big.sizes(tmp_path / "model.safetensors").tensors == sizes.tensors
    placement = big.place(sizes, big.budget({"cpu": 500}))
    assert placement.bytes_on("cpu") <= 500 and placement.streamed


def test_budgets_are_read_sorted_and_measured(monkeypatch):
    asked = {"disk": "1GB", "cpu": 7, 1: "2KiB", "cuda:0": 5}
    wanted = {"cuda:0": 5, "cuda:1": 2048, "cpu": 7, "disk": 10**9}
    assert list(big.budget(asked).items()) == list(wanted.items())
    monkeypatch.setattr(budgets, "available_memory", lambda: (1000, 2000, 3000))
    assert big.budget([("cpu", "50%")]) == {"cpu": 500}
    monkeypatch.setattr(budgets, "_accelerators", lambda: [])
    assert big.budget(keep_free=0.25) == {"cpu": 750}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"gpu": 1}, "not a device"),
        ({"cpu": "10 apples"}, r"memory"),
        ({"cpu": "101%"}, "0% to 100%"),
        ({"disk": "50%"}, "pass bytes"),
        ({"meta:7": "50%"}, "this machine has no meta:7"),
        ({0: 1, "cuda:0": 2}, "listed twice"),
        ([("cpu", 1), ("cpu", 2)], "listed twice"),
    ],
)
def test_budgets_that_make_no_sense(limits, words):
    with pytest.raises(fx.PlanError, match=words):
        big.budget(limits)


def test_a_mapping_may_cut_units_and_is_checked():
    sizes = big.sizes(Net())
    placement = big.place(
        sizes, policy={"": 0, "layers.1.inner": "disk", "layers.2": "cpu"}, prefetch=2
    )
    held = {unit.name: (unit.device, unit.bytes) for unit in placement.units}
    assert held["layers.1.inner"] == ("disk", 64) and held["layers.1"] == ("cuda:0", 24)
    assert held["layers.2"] == ("cpu", 88) and placement.room == 3 * 80
    assert placement.bytes_on("cpu") == 80 + placement.staging
    for policy, words in (
        ({"": "cpu", "layer": "disk"}, "Did you mean 'layers'"),
        ({"layers": "cpu"}, "does not cover these units of Net: 'bias', 'embed'"),
        ({"": "cpu", "head": "disk"}, "share a tied tensor"),
        ({"": "gpu"}, "not a device"),
    ):
        with pytest.raises(fx.PlanError, match=words):
            big.place(sizes, policy=policy)
    with raises_code("FX200", "'attention'"):
        big.place(sizes, big.budget({"cpu": 100}), policy={"": "cpu"})


def test_what_is_resident_stays_where_it_computes():
    sizes = big.sizes(Net())
    names = ("layers.2.inner.weight", "head")
    placement = big.place(sizes, big.budget({"cuda:0": 510, "cpu": 1000}), resident=names)
    held = {unit.name: unit.device for unit in placement.units}
    assert held["layers.2.inner.weight"] == held["head"] == held["embed"] == "cuda:0"  # a tie
    assert held["layers.2"] == "cpu" and placement.bytes_on("cuda:0") <= 510
    with raises_code("FX200", "resident=", "64 B", "50 B"):
        big.place(sizes, big.budget({"cpu": 50}), resident=names[:1])
    with raises_code("FX200", "'haed'", "'head'"):
        big.place(sizes, big.budget({"cpu": 50}), resident=("haed",))


def test_room_is_kept_for_activations_and_the_cache():
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=64, num_key_value_heads=2,
    )  # fmt: skip
    sizes = big.sizes(lambda: transformers.LlamaForCausalLM(config))
    cache = 2 * 2 * 2 * 8 * 4 * 3 * 100  # keys and values, layers, heads, width, bytes, tokens
    bare = big.place(sizes, big.budget({"cuda:0": 10**6}))
    placement = big.place(
        sizes, big.budget({"cuda:0": 10**6}), batch=3, tokens=100, activations=1000
    )
    assert placement.bytes_on("cuda:0") - bare.bytes_on("cuda:0") == cache + 1000
    assert sum(unit.working for unit in placement.units) == cache
    with raises_code("FX200", "Net"):
        big.place(big.sizes(Net()), big.budget({"cpu": 10**6}), tokens=5)


def test_what_cannot_be_placed_names_unit_need_and_place():
    sizes = big.sizes(Net())
    with raises_code("FX200", "100 B", "'attention'", "MultiheadAttention", "256 B"):
        big.place(sizes, big.budget({"cuda:0": 100}))
    with raises_code("FX200", "692 B", "10 B", "0 B"):
        big.place(sizes, big.budget({"cuda:0": 600, "cpu": 10, "disk": 0}))
    with raises_code("FX200", "10 B", "256 B"):
        big.place(sizes, big.budget({"cuda:0": 600, "cpu": 10, "disk": 10**9}))
    with raises_code("FX200", "place"):
        big.place(sizes, big.budget({"disk": 10}))
    with raises_code("FX200", "place(policy='fast'"):
        big.place(sizes, big.budget({"cpu": 10**6}), policy="fast")


def test_placements_are_compared_and_kept_in_files(tmp_path):
    sizes = big.sizes(Net())
    first, second = (big.place(sizes, big.budget({"cpu": size})) for size in (650, 10_000))
    changes = {change.path: (change.left, change.right) for change in fx.diff(first, second)}
    assert changes.pop("room") == (first.room, 0) and changes
    assert {path: words for path, words in changes.items() if words != ("disk", "cpu")} == {}
    assert all(path.startswith("units[") and path.endswith("].device") for path in changes)
    for suffix in ("json", "toml", "yaml"):
        write_record(first, tmp_path / f"placement.{suffix}")
        assert read_record(tmp_path / f"placement.{suffix}", fx.state.Placement) == first
    with raises_code("FX200", "'bias'"):
        fx.state.Placement(units=(first.units[0], first.units[0]))


def test_offload_is_a_value_too():
    strategy = fx.Offload(memory={"cuda:0": "10GiB", "cpu": "50%"})
    for form in ("json", "toml", "yaml"):
        assert fx.state.loads(fx.state.dumps(strategy, form), fx.Offload, form) == strategy
    for wrong in ({"memory": {"cpu": "10XB"}}, {"memory": {"cpu": "120%"}}):
        with pytest.raises(fx.PlanError):
            fx.Offload(**wrong)
