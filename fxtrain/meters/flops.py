"""Floating-point operations: what a function needs, and what a device can do."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from fxtrain.state import DistContext, Wrapped

# By the device's name: dense operations per second with fp32, TF32, bf16 and fp16 products. None
# where a device has no such units. Figures of sparse matrices in data sheets are halved.
_PEAKS: tuple[tuple[str, dict[str, float | None]], ...] = (
    # https://resources.nvidia.com/en-us-tensor-core; the H200 has the same chip.
    ("H200", {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12}),
    ("H100 PCIe", {"fp32": 51.2e12, "tf32": 378e12, "bf16": 756e12, "fp16": 756e12}),
    ("H100 80GB HBM3", {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12}),
    # NVIDIA A100 data sheet; SXM and PCIe alike.
    ("A100", {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}),
    # NVIDIA A10 data sheet.
    ("A10", {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12, "fp16": 125e12}),
    # NVIDIA Ada architecture white paper.
    ("L4", {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12, "fp16": 121e12}),
    # NVIDIA T4 data sheet.
    ("T4", {"fp32": 8.1e12, "tf32": None, "bf16": None, "fp16": 65e12}),
)


def count_flops(fn: Callable[[], object]) -> int:
    """Floating-point operations of one call, on this rank, by torch's own counter.

    It counts products of matrices, convolutions and attention, forward and backward, as the
    counter does. Call it once on a step or a forward and backward, not in a loop: it dispatches
    every operator in Python. Models that `torch.compile` made are counted only in part.

    Example:
        >>> import fxtrain as fx, torch
        >>> fx.count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
        48
    """
    counter = FlopCounterMode(display=False)
    with counter:
        fn()
    return int(counter.get_total_flops())


def peak_flops(ctx: DistContext, precision: str) -> float | None:
    """Dense operations per second that this rank's device can do; None where that is unknown.

    Args:
        precision: Of the products: fp32, tf32, bf16 or fp16.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.meters.peak_flops(ctx, "bf16") is None
        True
    """
    if ctx.device.type != "cuda":
        return None
    return _peak_of(torch.cuda.get_device_name(ctx.device), precision)


def peak_of_model(model: Wrapped) -> float | None:
    """Operations per second of this rank's device in a model's precision, if they can be counted.

    None where the peak is unknown, and for compiled models, of which torch counts only a part.
    """
    precision: str = model.plan.precision.compute
    if precision == "fp32":
        dtype = next((one.dtype for one in model.parameters()), torch.float32)
        on_cuda = model.ctx.device.type == "cuda"
        tf32 = on_cuda and torch.get_float32_matmul_precision() != "highest"
        single = "tf32" if tf32 else "fp32"
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, single)
    return None if model.plan.compile else peak_flops(model.ctx, precision)


def _peak_of(device: str, precision: str) -> float | None:
    words = device.replace("-", " ").replace("A10G", "A10").split()
    for name, peaks in _PEAKS:
        if all(word in words for word in name.split()):
            return peaks.get(precision)
    return None
