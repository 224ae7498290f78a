"""torchao's CPUOffloadOptimizer on the device of the tests."""

from contextlib import contextmanager
from unittest import mock

import torch

from fxtrain.testing import laws, training


class _Named(str):
    """The name of a device that torchao does not know, and takes for XPU."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        return other == "xpu" or str.__eq__(self, other)


@contextmanager
def device_known(ctx):
    """A block in which torchao's class finds the device of a context."""
    from torchao.optim import cpu_offload

    kind = ctx.device.type
    if kind in ("cuda", "xpu"):
        yield
        return
    with mock.patch.object(cpu_offload, "get_available_devices", lambda: ["cpu", _Named(kind)]):
        yield


def offload(params, kind=torch.optim.AdamW, **settings):
    from torchao.optim import CPUOffloadOptimizer

    settings.setdefault("lr", 1e-3)
    return CPUOffloadOptimizer(params, kind, **settings)


def fused(params, **settings):
    return torch.optim.AdamW(params, lr=1e-3, fused=True, **settings)


def _sgd(params):
    """That of the laws; parameters of more than 63 values are updated on the host."""
    return offload(params, torch.optim.SGD, lr=0.3, momentum=0.8, minimal_size=64)


def _with_offload(ctx, function, *args):
    with (
        device_known(ctx),
        mock.patch.object(training, "sgd", _sgd),
        mock.patch.object(laws, "sgd", _sgd),
    ):
        return function(ctx, *args)


class Offloading:
    """A pool whose ranks train with updates on the host, for laws."""

    def __init__(self, pool):
        self.pool, self.n = pool, pool.n

    def run(self, function, *args):
        return self.pool.run(_with_offload, function, *args)


def values(module):
    return [parameter.detach().cpu().clone() for parameter in module.parameters()]


def states(model):
    found = {}
    for name, parameter in model.module.named_parameters():
        for key, value in model.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value.detach().cpu().clone()
    return found


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(torch.equal, one, other))
