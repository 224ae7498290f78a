"""Four-bit layers compute as bitsandbytes does, and no forward changes what is saved."""

import threading

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.precision.quantizing import quantize_layers, stored_tensors

bnb = pytest.importorskip("bitsandbytes", reason="needs fxtrain[quant]")

X = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
FORMATS = pytest.mark.parametrize("form", ["nf4", "fp4"])


def _layer(form, **fields):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 192))
    quantize_layers(net, fx.Bnb4(quant_type=form, head=True, **fields), torch.device("cpu"))
    return net[0].requires_grad_(False)


def _bytes(layer):
    return {name: tensor.detach().clone() for name, tensor in stored_tensors(layer).items()}


@FORMATS
@pytest.mark.parametrize("compute", ["bf16", "fp32", "fp16", None])
def test_a_layer_computes_the_product_of_the_library_in_every_mode(form, compute):
    layer = _layer(form, compute=compute)
    before = _bytes(layer)
    torch.manual_seed(0)
    plain = nn.Linear(128, 192)
    packed, state = bnb.functional.quantize_4bit(
        plain.weight.detach(), blocksize=64, compress_statistics=True, quant_type=form
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute, torch.float32)
    wanted = bnb.matmul_4bit(
        X.to(dtype), packed, quant_state=state, bias=plain.bias.detach().to(dtype)
    ).float()
    trained = layer.train()(X)
    with torch.inference_mode():
        evaluated = layer.eval()(X)
    assert torch.equal(trained, wanted) and torch.equal(evaluated, wanted)
    after = _bytes(layer)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_inputs_of_any_shape():
    layer = _layer("nf4").eval()
    wanted = layer(X)
    assert torch.equal(layer(X.t().contiguous().t()), wanted)
    assert torch.equal(layer(X.view(7, 1, 128)), wanted.view(7, 1, 192))
    assert layer(X[:0]).shape == (0, 192)
    with pytest.raises(RuntimeError):
        layer(X[:, :64])


def test_gradients_pass_through_a_layer_in_evaluation_mode():
    x = X.clone().requires_grad_()
    _layer("nf4").eval()(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_threads_evaluate_and_save_one_model():
    layer = _layer("nf4").eval()
    wanted, wrong, start = layer(X), [], threading.Barrier(4)

    def evaluate(saves):
        start.wait()
        for _ in range(30):
            if saves:
                stored_tensors(layer)
            if not torch.equal(layer(X), wanted):
                wrong.append(saves)

    threads = [threading.Thread(target=evaluate, args=(number == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
