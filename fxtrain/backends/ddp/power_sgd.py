"""PowerSGD's state in a checkpoint: its error feedback and its projections."""

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from fxtrain.backends.core.model_state import load_state, state_of
from fxtrain.backends.core.optimizer_state import own_tensor_of_ranks
from fxtrain.state import ModelState, StateReader, Wrapped

_KEY = "power_sgd"
_COUNTS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


def power_sgd_state(model: Wrapped) -> ModelState:
    """`state_of`, and the state of the hook if the model has one.

    Errors are each rank's own; everything else of the hook is equal on all ranks.
    """
    found, hook = state_of(model), _hook(model)
    if hook is None:
        return found
    _, key, place, has_gauss, cached = hook.rng.get_state(legacy=True)
    values = {
        "counts": {name: getattr(hook, name) for name in _COUNTS},
        "random": [torch.tensor(key.tolist(), device="cpu"), place, has_gauss, cached],
        "p": dict(hook.p_memory_dict),
        "q": dict(hook.q_memory_dict),
        "buckets": _buckets(model),
    }
    errors = {f"{_KEY}.error.{bucket}": one for bucket, one in hook.error_dict.items()}
    return attrs.evolve(found, own={**found.own, **errors}, values={**found.values, _KEY: values})


def load_power_sgd(model: Wrapped, saved: StateReader) -> None:
    """`load_state`, and the hook's state, which is reset if buckets have another layout.

    At another world size, each rank gets the mean of the errors, which is what they contribute
    to the mean gradient.
    """
    load_state(model, saved)
    hook, values = _hook(model), saved.values.get(_KEY)
    if hook is None or values is None or values["buckets"] != _buckets(model):
        return
    for name in _COUNTS:
        setattr(hook, name, values["counts"][name])
    key, place, has_gauss, cached = values["random"]
    hook.rng.set_state(("MT19937", key.numpy().astype("uint32"), place, has_gauss, cached))
    device = model.ctx.device
    hook.p_memory_dict = {bucket: one.to(device) for bucket, one in values["p"].items()}
    hook.q_memory_dict = {bucket: one.to(device) for bucket, one in values["q"].items()}
    errors = {bucket: _error(saved, bucket) for bucket in range(len(values["buckets"]))}
    hook.error_dict = {b: one.to(device) for b, one in errors.items() if one is not None}


def _hook(model: Wrapped) -> Any:
    found = getattr(model.engine, "hook_state", None)
    return found if isinstance(found, PowerSGDState) else None


def _buckets(model: Wrapped) -> list[int]:
    """The size of the buckets, on which the layout of the hook's state depends."""
    return [
        bucket.buffer().numel() for bucket in model.engine.reducer._get_zeros_like_grad_buckets()
    ]


def _error(saved: StateReader, bucket: int) -> Tensor | None:
    name = f"{_KEY}.error.{bucket}"
    if saved.ranks == saved.loading_ranks:
        return saved.own(name, saved.rank)
    found = own_tensor_of_ranks(saved, name)
    return torch.stack(found).mean(0) if found else None
