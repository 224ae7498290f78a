"""What a context and a wrapped model print: one line."""

import torch

import fxtrain as fx


def test_a_context_and_a_model_print_what_matters():
    with fx.detect(env={}, device="cpu") as ctx:
        assert repr(ctx) == "DistContext(rank 0 of 1 on cpu)"
        net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(50)))
        plan = fx.Plan(strategy="single", precision="bf16")
        model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        assert repr(model) == "Wrapped(Sequential, Single, bf16, SGD, rank 0 of 1 on cpu)"
        fx.unwrap(model)
        assert repr(model).endswith("rank 0 of 1 on cpu, closed by fx.unwrap)")
    assert repr(ctx) == "DistContext(rank 0 of 1 on cpu, closed)"


def test_a_context_names_its_axes_and_node():
    ctx = fx.DistContext(
        rank=5, world_size=8, num_nodes=2, node_rank=1, mesh=fx.Mesh(shard=4, tensor=2)
    )
    assert repr(ctx) == "DistContext(rank 5 of 8 on cpu, shard=4, tensor=2, node 1 of 2)"
