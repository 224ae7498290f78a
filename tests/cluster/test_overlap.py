"""When DDP starts to send its buckets, compared with torch's own DistributedDataParallel."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import fxtrain as fx
from fxtrain import ops

WIDTH = 64
BUCKET_MIB = 2.5 * WIDTH * WIDTH * 4 / 2**20  # two layers and a half


class _AsUsed(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


class _OtherOrder(nn.Module):
    """Registers its parts as the U-Nets of diffusers do, not in the order of their use."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.mid = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n)) for n in (3, 4, 1)
        )

    def forward(self, x):
        for layer in (*self.down, *self.mid, *self.up):
            x = layer(x)
        return x


def _watch(engine):
    """The number of gradients that are ready when each bucket is sent."""
    ready, log = set(), []
    for parameter in engine.module.parameters():
        parameter.register_hook(lambda _, p=parameter: ready.add(p))

    def hook(state, bucket):
        log.append(len(ready))
        return allreduce_hook(state, bucket)

    engine.register_comm_hook(None, hook)
    return ready, log


def _starts(ctx, kind, config, in_step):
    """For torch's and for ours: by update, when buckets are sent; and the last gradients."""
    out, x = [], torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(ctx.rank))
    plan = fx.Plan(strategy=config)
    for ours in (False, True):
        torch.manual_seed(0)
        net = kind()
        if ours:
            model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
            engine = model.engine
        else:
            engine = nn.parallel.DistributedDataParallel(
                net,
                bucket_cap_mb=BUCKET_MIB,
                find_unused_parameters=config.unused_parameters,
                static_graph=config.static_graph,
            )
        ready, log = _watch(engine)
        updates = []
        for _ in range(3):
            ready.clear()
            log.clear()
            net.zero_grad()
            if ours and in_step:
                with ops.sync(model, enabled=True):
                    ops.backward(model(x).square().mean(), model)
            else:
                engine(x).square().mean().backward()
            updates.append([*log])
        out.append((updates, [p.grad.clone() for p in net.parameters()]))
    return out


def _assert_as_torch(results):
    for (theirs, expected), (ours, got) in results:
        assert ours[1:] == theirs[1:]
        assert theirs[2][0] < 12  # of 16 gradients: the test would see an overlap
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_buckets_are_sent_as_early_as_by_torch(pair):
    configs = {"all": {}, "unused": {"unused_parameters": True}, "static": {"static_graph": True}}
    for kind in (_AsUsed, _OtherOrder):
        for options in configs.values():
            config = fx.DDP(bucket_mib=BUCKET_MIB, **options)
            in_step = kind is _OtherOrder  # and in a loop by hand otherwise
            _assert_as_torch(pair.run(_starts, kind, config, in_step))


def test_the_first_update_has_the_buckets_of_later_ones(pair):
    for in_step in (True, False):
        results = pair.run(_starts, _OtherOrder, fx.DDP(bucket_mib=BUCKET_MIB), in_step)
        for _, (ours, _) in results:
            assert ours[0] == ours[1] == ours[2]
            assert ours[0][0] < 8
