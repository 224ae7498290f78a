"""Kernels of GPUs that replace a loop elsewhere: of experts, and of documents in a row."""

import pytest
import torch

import fxtrain as fx
from tests.devices._device import is_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _experts(ctx, width):
    """How far outputs and gradients in bf16 are from those in float64 on the CPU."""
    torch.manual_seed(0)
    tokens, weights = torch.randn(50, 16), torch.rand(50, 2)
    first, last = torch.randn(4, 16, width) / 4, torch.randn(4, width, 16) / 4
    index = torch.randint(5, (50, 2))  # 4 stands for none
    index[index == 2] = 1  # an expert without tokens
    off = []
    for device, dtype in (("cpu", torch.float64), (ctx.device, torch.bfloat16)):
        leaves = [x.to(device, dtype).requires_grad_() for x in (tokens, weights, first, last)]
        x, shares, up, down = leaves
        out = fx.experts.mix(
            x,
            index.to(device),
            shares,
            4,
            lambda rows, product, up=up, down=down: product(product(rows, up).relu(), down),
        )
        out.square().mean().backward()
        off.append([t.detach().double().cpu() for t in (out, *(leaf.grad for leaf in leaves))])
    return [float((ours - exact).norm() / exact.norm()) for exact, ours in zip(*off, strict=True)]


@pytest.mark.parametrize("width", [32, 12])  # grouped products need widths of whole 16 bytes
def test_experts_agree_with_a_loop(gpu, width):
    (errors,) = gpu.run(_experts, width)
    assert max(errors) < 0.03


def _documents(ctx, heads, dtype):
    """How far attention within documents is from float64 on the CPU, with its gradients."""
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(n) for n in (5, 40, 1, 18)]).view(2, 32)
    positions[1, 0] = 0  # a row begins a document
    shapes = [(2, 4, 32, 16), (2, heads, 32, 16), (2, heads, 32, 16)]
    inputs, off = [torch.randn(shape) for shape in shapes], []
    for device, kind in (("cpu", torch.float64), (ctx.device, dtype)):
        leaves = [x.to(device, kind).requires_grad_() for x in inputs]
        bounds = fx.data.document_bounds(positions.to(device))
        out = fx.data.document_attention(*leaves, bounds)
        out.square().mean().backward()
        off.append([t.detach().double().cpu() for t in (out, *(leaf.grad for leaf in leaves))])
    return [float((ours - exact).norm() / exact.norm()) for exact, ours in zip(*off, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [4, 2])
def test_documents_attend_to_themselves(gpu, heads, dtype):
    (errors,) = gpu.run(_documents, heads, dtype)
    assert max(errors) < (0.03 if dtype == torch.bfloat16 else 0.01)


def _waits(ctx):
    """Whether grouped products leave the host free."""
    if not is_gpu(ctx):
        return True
    x = torch.randn(64, 16, device=ctx.device, dtype=torch.bfloat16)
    weight = torch.randn(4, 16, 16, device=ctx.device, dtype=torch.bfloat16)
    index = torch.randint(4, (64, 2), device=ctx.device)
    shares = torch.rand(64, 2, device=ctx.device, dtype=torch.bfloat16)
    fx.experts.mix(x, index, shares, 4, lambda rows, product: product(rows, weight))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    fx.experts.mix(x, index, shares, 4, lambda rows, product: product(rows, weight))
    return not torch.cuda.current_stream().query()


def test_grouped_products_leave_the_host_free(gpu):
    assert gpu.run(_waits) == [True]
