"""Four-bit weights in the layout of a CPU's kernel: same products as the library, no bit lost."""

import copy
import io
import threading

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.precision.quantizing import quantize_layers, stored_tensors

bnb = pytest.importorskip("bitsandbytes", reason="needs fxtrain[quant]")
prepacked = pytest.importorskip("fxtrain.precision.bnb_modules")

X = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
FORMATS = pytest.mark.parametrize("form", ["nf4", "fp4"])
needs_kernel = pytest.mark.skipif(
    not bnb.functional.has_avx512bf16(), reason="a CPU without AVX512-BF16"
)


def _emulated(x, weight, quant_state, bias=None):
    """The kernel's product, on CPUs that lack it: scales in bf16, sums in fp32."""
    if not getattr(quant_state, "packing_format_for_cpu", False):
        return _LIBRARY(x, weight, quant_state=quant_state, bias=bias)
    packed = copy.copy(quant_state)
    packed.original_dtype, packed.original_nested = torch.float32, False
    packed.original_qshape = (weight.numel(), 1)
    exact, state = bnb.functional._convert_weight_packed_for_cpu_inverse(weight, packed)
    state.dtype = torch.float32
    values = bnb.functional.dequantize_4bit(exact, state)
    found = (x.float() @ values.T).to(x.dtype)
    return found if bias is None else found + bias


_LIBRARY = bnb.matmul_4bit


@pytest.fixture(autouse=True)
def _kernel(monkeypatch):
    if not prepacked._HAS_KERNEL:
        monkeypatch.setattr(prepacked, "_HAS_KERNEL", True)
        monkeypatch.setattr(bnb, "matmul_4bit", _emulated)


def _net(form="nf4", **fields):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64), nn.Linear(64, 10))
    quantize_layers(net, fx.Bnb4(quant_type=form, head=True, **fields), torch.device("cpu"))
    return net.eval().requires_grad_(False)


def _bytes(net):
    return {name: one.detach().clone() for name, one in stored_tensors(net).items()}


def _same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def _copied(net):
    return [part._copy is not None for part in net if isinstance(part, nn.Linear)]


def _evaluated(net, x=X):
    with torch.no_grad():
        return net(x)


@needs_kernel
@FORMATS
def test_evaluation_equals_the_library_by_hand(form):
    torch.manual_seed(0)
    plain = nn.Linear(128, 192)
    by_hand = bnb.nn.Linear4bit(128, 192, quant_type=form, compute_dtype=torch.bfloat16)
    by_hand.load_state_dict(plain.state_dict())
    by_hand = by_hand.to("cpu").eval()
    x = X.bfloat16()
    assert torch.equal(_evaluated(_net(form)[0], x), _evaluated(by_hand, x))
    assert torch.equal(_evaluated(_net(form)[0], x[0]), _evaluated(by_hand, x[0]))


@FORMATS
def test_no_bit_is_lost(form):
    net = _net(form)
    before, trained = _bytes(net), net.train()(X)
    with torch.inference_mode():
        found = net.eval()(X)
    assert _copied(net) == [True, True, False]  # 10 rows are not a block of the kernel
    assert not torch.equal(found, trained)
    assert (found - trained).norm() < 0.02 * trained.norm()
    _same(_bytes(net), before)
    assert torch.equal(_evaluated(net), found)
    assert torch.equal(net.train()(X), trained) and _copied(net) == [False] * 3
    x = X.clone().requires_grad_()
    net.eval()(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert torch.equal(_evaluated(net), found)


def test_models_and_files_that_are_copied_hold_the_same(tmp_path):
    net = _net()
    before, found = _bytes(net), _evaluated(net)
    pickled = io.BytesIO()
    torch.save(net, pickled)
    pickled.seek(0)
    for other in (copy.deepcopy(net), torch.load(pickled, weights_only=False)):
        assert _copied(other) == [False] * 3
        assert torch.equal(_evaluated(other), found)
        _same(_bytes(other), before)
    fx.export(net, tmp_path)
    plain = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64), nn.Linear(64, 10))
    fx.load_model(tmp_path, plain)
    _same(_bytes(plain), before)
    _same(net.state_dict(), _net().state_dict())
    net.float()
    _same(_bytes(net), before)
    assert _copied(net) == [False] * 3


def test_a_weight_that_changes_is_copied_again():
    net, other = _net(), _net()
    found = _evaluated(net)
    quantize = bnb.functional.quantize_4bit
    packed, _ = quantize(torch.randn(192, 128), blocksize=64, quant_type="nf4")
    with torch.no_grad():
        for part in (net[0], other[0]):
            part.weight.copy_(packed)
    assert not torch.equal(_evaluated(net), found)
    assert torch.equal(_evaluated(net), _evaluated(other))
    net[0].weight = _net()[0].weight
    assert torch.equal(_evaluated(net), found)


def test_wrapping_after_an_evaluation_keeps_the_kernel():
    for double in (True, False):
        net = _net(double_quant=double)
        before, found = _bytes(net), _evaluated(net)
        with fx.detect(env={}, device="cpu") as ctx:
            model = fx.wrap(net, ctx, fx.Plan(quantize=fx.Bnb4(head=True, double_quant=double)))
            assert torch.equal(_evaluated(model), found)
        assert _copied(net) == [True, True, False]
        _same(_bytes(net), before)


def test_a_layer_whose_memory_a_strategy_replaces_computes_the_same():
    net = _net()
    found = _evaluated(net)
    net.train().eval()
    for part in (net[0], net[2]):
        part.keeps_copy = False
    assert torch.equal(_evaluated(net), found)
    assert _copied(net) == [False] * 3


@pytest.mark.parametrize("compute", ["fp32", "fp16", None])
def test_other_formats_of_products_are_not_rounded_to_bf16(compute):
    net = _net(compute=compute)
    assert torch.equal(_evaluated(net), net.train()(X))
    assert _copied(net) == [False] * 3


def test_inputs_of_any_form():
    net = _net()
    found = _evaluated(net)
    assert torch.equal(_evaluated(net, X.t().contiguous().t()), found)
    assert torch.equal(_evaluated(net, X.view(7, 1, 128)), found.view(7, 1, 10))
    assert _evaluated(net, X[:0]).shape == (0, 10)
    with pytest.raises(RuntimeError):
        _evaluated(net, X[:, :64])
    assert torch.equal(_evaluated(net), found)


def test_threads_evaluate_one_model():
    net, wanted = _net(), _evaluated(_net())
    wrong, start = [], threading.Barrier(4)

    def evaluate(saves):
        start.wait()
        for _ in range(30):
            if saves:
                stored_tensors(net)
            if not torch.equal(_evaluated(net), wanted):
                wrong.append(saves)

    threads = [threading.Thread(target=evaluate, args=(number == 0,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not wrong


def test_a_compiled_graph_reads_the_weight_as_it_is():
    net = _net()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    plain = net.train()(X)
    _evaluated(net.eval())
    assert torch.equal(_evaluated(compiled), plain)
    net.train()
    assert torch.equal(compiled(X), plain)
