"""Inference through a pipeline: each rank has some of the layers, and all get the outputs.

    python examples/features/pipeline_inference.py
    fxtrain launch --ranks 2 examples/features/pipeline_inference.py

The model is split at its blocks by itself, and called as always. To answer prompts by ranks that
have the whole model each, see examples/coming_from/inference. Ends with one JSON line: the share
of the parameters on this rank, and how far the outputs are from those of the model on one device.
"""

import json

import torch
from torch import nn

import fxtrain as fx
from fxtrain import ops


class Block(nn.Module):
    """A residual block: (rows, 64) → (rows, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.layer(self.norm(x)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), *(Block() for _ in range(6)), nn.Linear(64, 4))


def main(ctx: fx.DistContext) -> dict[str, float]:
    ranks = ctx.world_size
    strategy = fx.PP(microbatches=4) if ranks > 1 else fx.Single()
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    with fx.detect(mesh=fx.Mesh(pipeline=ranks), device=ctx.device) as placed:
        model = fx.wrap(network(), placed, fx.Plan(strategy=strategy))
        with torch.no_grad():
            outputs = model.eval()(rows.to(placed.device)).cpu()
        here = sum(parameter.numel() for parameter in model.parameters())
    whole = network()
    with torch.no_grad():
        apart = (outputs - whole(rows)).abs().max().item()
    return {"share": here / sum(p.numel() for p in whole.parameters()), "apart": apart}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
