"""Four-bit weights in the layout of a CPU's kernel: same products as the library, no bit lost."""

import copy
import io
import threading

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.precision.plain_tensors import stored_tensors
from fxtrain.precision.quantizing import quantize_layers

bnb = pytest.importorskip("bitsandbytes", reason="needs fxtrain[quant]")
prepacked = pytest.importorskip("fxtrain.precision.bnb_modules")

X = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
SHAPES = [(32, 64), (96, 128), (512, 192)]
FORMATS = pytest.mark.parametrize("form", ["nf4", "fp4"])
needs_kernel = pytest.mark.skipif(
    not bnb.functional.has_avx512bf16(), reason="a CPU without AVX512-BF16"
)


def _emulated(x, weight, quant_state, bias=None):
    """The kernel's product, on CPUs that lack it: scales in bf16, sums in fp32."""
    if not getattr(quant_state, "packing_format_for_cpu", False):
        return _LIBRARY(x, weight, quant_state=quant_state, bias=bias)
    exact = copy.copy(quant_state.exact)
    exact.absmax, exact.state2, exact.nested = quant_state.absmax.T.reshape(-1).float(), None, False
    exact.dtype = torch.float32
    values = bnb.functional.dequantize_4bit(prepacked._unpack(weight, exact), exact)
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


def _packed(net):
    weights = [part._parameters["weight"] for part in net if isinstance(part, nn.Linear)]
    return [hasattr(one.quant_state, "exact") for one in weights]


def _evaluated(net, x=X):
    with torch.no_grad():
        return net(x)


@FORMATS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("double", [True, False])
def test_the_layout_is_that_of_the_library_and_is_undone_bit_for_bit(form, shape, double):
    weight, exact = bnb.functional.quantize_4bit(
        torch.randn(shape), blocksize=64, compress_statistics=double, quant_type=form
    )
    wanted, state = bnb.functional._convert_weight_packed_for_cpu(
        weight.clone(), copy.deepcopy(exact)
    )
    packed, found = prepacked._pack(weight, exact), prepacked._kernel_state(exact)
    assert torch.equal(packed.view(wanted.shape), wanted)
    assert torch.equal(found.absmax, state.absmax) and found.absmax.dtype == torch.bfloat16
    assert torch.equal(prepacked._unpack(packed, exact), weight)
    words = weight.view(-1).view(torch.int16)  # files may hold bytes in a wider dtype
    assert torch.equal(prepacked._unpack(prepacked._pack(words, exact), exact), words)


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
    assert _packed(net) == [True, True, False]  # 10 rows are not a block of the kernel
    assert not torch.equal(found, trained)
    assert (found - trained).norm() < 0.02 * trained.norm()
    _same(_bytes(net), before)
    assert _packed(net) == [False] * 3
    assert torch.equal(_evaluated(net), found)
    assert torch.equal(net.train()(X), trained) and _packed(net) == [False] * 3
    x = X.clone().requires_grad_()
    net.eval()(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert torch.equal(_evaluated(net), found)


def test_copies_and_files_hold_the_same(tmp_path):
    net = _net()
    before, found = _bytes(net), _evaluated(net)
    copied = copy.deepcopy(net)
    pickled = io.BytesIO()
    torch.save(net, pickled)
    pickled.seek(0)
    loaded = torch.load(pickled, weights_only=False)
    for other in (copied, loaded):
        assert _packed(other) == [True, True, False]
        assert torch.equal(_evaluated(other), found)
        _same(_bytes(other), before)
    _evaluated(net)
    fx.export(net, tmp_path)
    plain = nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 64), nn.Linear(64, 10))
    fx.load_model(tmp_path, plain)
    _same(_bytes(plain), before)
    for _ in range(2):
        _same(net.state_dict(), _net().state_dict())
        _evaluated(net)
    _evaluated(net)
    net.float()
    _same(_bytes(net), before)


def test_a_copy_on_a_cpu_without_the_kernel_is_restored(monkeypatch):
    net = _net()
    plain, before = net.train()(X), _bytes(net)
    _evaluated(net.eval())
    monkeypatch.setattr(prepacked, "_HAS_KERNEL", False)
    assert torch.equal(_evaluated(net), plain)
    assert _packed(net) == [False] * 3
    _same(_bytes(net), before)


def test_wrapping_after_an_evaluation_keeps_the_kernel():
    for double in (True, False):
        net = _net(double_quant=double)
        before, found = _bytes(net), _evaluated(net)
        with fx.detect(env={}, device="cpu") as ctx:
            model = fx.wrap(net, ctx, fx.Plan(quantize=fx.Bnb4(head=True, double_quant=double)))
            assert torch.equal(_evaluated(model), found)
        assert _packed(net) == [True, True, False]
        _same(_bytes(net), before)


def test_a_weight_that_is_read_is_that_of_files():
    net = _net()
    found = _evaluated(net)
    held, state = net[0].weight.data, net[0].weight.quant_state
    values = bnb.functional.dequantize_4bit(held, state)
    assert torch.equal(values, bnb.functional.dequantize_4bit(held, _net()[0].weight.quant_state))
    for _ in range(2):
        assert torch.equal(_evaluated(net), found)
        assert _packed(net) == [False, True, False]
    with pytest.raises(AttributeError, match="weight"):
        del net[0].weight
        _ = net[0].weight


def test_a_layer_whose_memory_a_strategy_replaces_computes_the_same():
    net = _net()
    found = _evaluated(net)
    for part in (net[0], net[2]):
        part.keep_layout()
    assert torch.equal(_evaluated(net), found)
    assert _packed(net) == [False] * 3


@pytest.mark.parametrize("compute", ["fp32", "fp16", None])
def test_other_formats_of_products_are_not_rounded_to_bf16(compute):
    net = _net(compute=compute)
    assert torch.equal(_evaluated(net), net.train()(X))
    assert _packed(net) == [False] * 3


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


@needs_kernel
def test_compiled_graphs_read_either_layout():
    net = _net()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    plain = net.train()(X)
    assert torch.equal(_evaluated(compiled.eval()), plain)  # packed by no evaluation yet
    found = _evaluated(net)
    assert torch.equal(_evaluated(compiled), found)
    assert torch.equal(net.eval()(X), plain)
    net.train()
    assert torch.equal(compiled(X), plain)
