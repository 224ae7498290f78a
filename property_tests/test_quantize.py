"""Laws of quantized weights: files keep every byte, and skipped layers stay as they are."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.precision.quantizing import planned_layers, quantize_layers, stored_tensors

pytest.importorskip("bitsandbytes", reason="needs fxtrain[quant]")
pytest.importorskip("torchao", reason="needs fxtrain[quant]")

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def records(draw):
    """A record of any library."""
    skip = draw(st.sampled_from([(), ("0",), ("1", "2")]))
    common = {"skip": skip, "head": draw(st.booleans())}
    bnb4 = st.builds(
        lambda **more: fx.Bnb4(**common, **more),
        quant_type=st.sampled_from(["nf4", "fp4"]),
        double_quant=st.booleans(),
        blocksize=st.sampled_from([64, 128]),
        compute=st.sampled_from(["fp32", "bf16", None]),
    )
    bnb8 = st.builds(lambda threshold: fx.Bnb8(threshold=threshold, **common), st.floats(0, 10))
    torchao = st.builds(
        lambda weights: fx.Torchao(weights=weights, **common), st.sampled_from(["int8", "float8"])
    )
    grouped = st.builds(
        lambda group: fx.Torchao(weights="int4", group=group, **common),
        st.sampled_from([32, 64]),
    )
    return draw(bnb4 | bnb8 | torchao | grouped)


def _unit(record):
    """What divides the sizes of layers that a record fits."""
    return record.group if getattr(record, "weights", "") == "int4" else 2


@st.composite
def nets(draw, unit):
    sizes = st.integers(1, 80 // unit).map(lambda n: unit * n)
    sizes = draw(st.lists(sizes, min_size=5, max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 9)))
    pairs = itertools.pairwise(sizes)
    net = nn.Sequential(*(nn.Linear(a, b, bias=bool(a % 4), dtype=dtype) for a, b in pairs))
    with torch.no_grad():  # special values, which arithmetic would lose
        net[0].weight.view(-1)[:2] = torch.tensor([0.0, -0.0])
    return net


@settings(max_examples=15, deadline=None)
@given(data=st.data(), record=records(), max_shard=st.sampled_from(["1KB", "5GB"]))
def test_quantize_save_load_is_the_identity_on_bytes(data, record, max_shard, tmp_path_factory):
    net = data.draw(nets(_unit(record)))
    before = {name: part.weight for name, part in net.named_children()}
    sizes = [(part.in_features, part.out_features) for part in net]
    names = planned_layers(net, record, CPU, trains=False)
    quantize_layers(net, record, CPU)
    for name, part in net.named_children():
        if name not in names:
            assert part.weight is before[name]
    folder = tmp_path_factory.mktemp("export")
    fx.export(net, folder, max_shard=max_shard)
    with torch.device("meta"):
        dtype = before["0"].dtype
        pairs = [(a, b, bool(a % 4)) for a, b in sizes]
        other = nn.Sequential(*(nn.Linear(a, b, bias=bias, dtype=dtype) for a, b, bias in pairs))
    fx.load_model(folder, other)
    one, two = stored_tensors(net), stored_tensors(other)
    assert list(one) == list(two)
    for name, value in one.items():
        assert value.dtype == two[name].dtype
        flat, same = (t.detach().reshape(-1).view(torch.uint8) for t in (value, two[name]))
        assert torch.equal(flat, same), name
    x = torch.ones(2, sizes[0][0], dtype=dtype)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), other.eval()(x), rtol=0, atol=0, equal_nan=True)


ACTIONS = {
    "evaluate": lambda net, x: net.eval()(x),
    "train": lambda net, x: net.train()(x),
    "copy": lambda net, x: copy.deepcopy(net).eval()(x),
    "read": lambda net, x: net[0].weight.sum(),
    "save": lambda net, x: net.state_dict(),
    "move": lambda net, x: net.to("cpu"),
}


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4).map(lambda n: 32 * n),
    columns=st.integers(1, 3).map(lambda n: 64 * n),
    record=st.builds(
        lambda form, double: fx.Bnb4(quant_type=form, double_quant=double, head=True),
        st.sampled_from(["nf4", "fp4"]),
        st.booleans(),
    ),
    actions=st.lists(st.sampled_from(sorted(ACTIONS)), max_size=8),
)
def test_no_order_of_evaluations_changes_weights_or_outputs(rows, columns, record, actions):
    torch.manual_seed(rows + columns)
    net = nn.Sequential(nn.Linear(columns, rows))
    quantize_layers(net, record, CPU)
    before = {name: one.detach().clone() for name, one in stored_tensors(net).items()}
    x, wanted = torch.randn(3, columns), {}
    with torch.no_grad():
        for action in actions:
            found = ACTIONS[action](net, x)
            if isinstance(found, torch.Tensor):
                kind = "evaluate" if action == "copy" else action
                assert torch.equal(wanted.setdefault(kind, found), found)
    after = stored_tensors(net)
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
