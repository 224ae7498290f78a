"""Convert the random generators of a rank to tensors and back."""

import math
import random
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._errors import CheckpointError
from fxtrain.ops.devices import device_random_state, set_device_random_state
from fxtrain.state import DistContext

_PYTHON, _GAUSS = "random.python", "random.python.gauss"
_NUMPY, _NUMPY_GAUSS = "random.numpy", "random.numpy.gauss"
_TORCH, _DEVICE = "random.torch", "random.device"


def random_state(ctx: DistContext) -> dict[str, Tensor]:
    """The state of Python's, NumPy's (if imported), torch's and the device's generators."""
    _, words, gauss = random.getstate()
    states = {
        _PYTHON: torch.tensor(words, dtype=torch.int64, device="cpu"),
        _GAUSS: torch.tensor(
            [math.nan if gauss is None else gauss], dtype=torch.float64, device="cpu"
        ),
        _TORCH: torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        _, key, index, has_gauss, cached = numpy.random.get_state(legacy=True)
        states[_NUMPY] = torch.tensor(
            [*key.tolist(), index, has_gauss], dtype=torch.int64, device="cpu"
        )
        states[_NUMPY_GAUSS] = torch.tensor([cached], dtype=torch.float64, device="cpu")
    device = device_random_state(ctx)
    if device is not None:
        states[_DEVICE] = device
    return states


def set_random_state(
    ctx: DistContext, own: Callable[[str, int], Tensor | None], ranks: int, fallback: int
) -> None:
    """Restore the generators of this rank; a rank that the saved run did not have is re-seeded.

    Args:
        own: (name, rank) → the tensor that a rank saved.
        ranks: Number of ranks that saved.
        fallback: Seed from which additional ranks derive their own.
    """
    if ctx.rank >= ranks:
        ops.seed(fallback, ctx, per_rank=True)
        return
    words, gauss = own(_PYTHON, ctx.rank), own(_GAUSS, ctx.rank)
    if words is not None and gauss is not None:
        # Earlier versions saved no value at all instead of NaN.
        spare = next((value for value in gauss.tolist() if not math.isnan(value)), None)
        random.setstate((3, tuple(words.tolist()), spare))
    state = own(_TORCH, ctx.rank)
    if state is not None:
        torch.set_rng_state(state)
    key, cached = own(_NUMPY, ctx.rank), own(_NUMPY_GAUSS, ctx.rank)
    if key is not None and cached is not None and (numpy := sys.modules.get("numpy")):
        *words, index, has_gauss = key.tolist()
        if len(words) != 624 or not 0 <= index <= 624:  # NumPy would read out of bounds
            raise CheckpointError("The saved state of NumPy's random generator is malformed.")
        found = numpy.array(words, dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", found, index, has_gauss, float(cached[0])))
    device = own(_DEVICE, ctx.rank)
    if device is not None:
        set_device_random_state(ctx, device)
