"""Models on which estimates of the time of a step are compared with measured steps."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxtrain as fx

VOCABULARY, LENGTH = 512, 256


class MlpBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mlp(nn.Module):
    def __init__(self, width: int = 512, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fused_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, attend: Any, dropout: float) -> None:
        super().__init__()
        self.width, self.attend = width // heads, attend
        self.norm, self.mlp = nn.LayerNorm(width), MlpBlock(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.norm(x_BTD)
        # As many heads as the layers make: a part of them under tensor parallelism.
        q, k, v = (
            part(y_BTD).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = self.attend(q, k, v)
        return self.mlp(x_BTD + self.drop(self.o(mixed.transpose(1, 2).flatten(2))))


class Gpt(nn.Module):
    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        words: int = VOCABULARY,
        attend: Any = fused_attention,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads, attend, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.embed(x_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class ConvBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, outside) for _ in range(2))
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.norms[0](self.first(x_BCHW)))
        return F.relu(self.short(x_BCHW) + self.norms[1](self.second(y_BCHW)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 32, 64, 64, 128)
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = nn.ModuleList(
            ConvBlock(inside, outside, 1 if inside == outside else 2)
            for inside, outside in zip((16, *widths), widths, strict=False)
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.stem(x_BCHW)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        return self.head(x_BCHW.mean((2, 3)))


class Experts(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * 0.02)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        def compute(rows: Tensor, product: Any) -> Tensor:
            return product(F.gelu(product(rows, self.up)), self.down)

        return fx.experts.mix(tokens, index, weights, self.num_experts, compute)


class MixtureBlock(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.experts = nn.Linear(width, count), Experts(width, count)

    def forward(self, x_BTD: Tensor) -> Tensor:
        tokens = self.norm(x_BTD).flatten(0, 1)
        weights, index = self.gate(tokens).softmax(-1).topk(2)
        return x_BTD + self.experts(tokens, index, weights).view_as(x_BTD)


class Mixture(nn.Module):
    def __init__(self, width: int = 256, depth: int = 3, count: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixtureBlock(width, count) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD.mean(1))


# By name: the model, the class of its blocks, rows of an update, and one row.
MODELS: dict[str, tuple[type[nn.Module], str, int, tuple[int, ...]]] = {
    "MLP": (Mlp, "MlpBlock", 512, (512,)),
    "GPT": (Gpt, "GptBlock", 16, (LENGTH,)),
    "ResNet": (ResNet, "ConvBlock", 64, (3, 32, 32)),
    "experts": (Mixture, "MixtureBlock", 32, (32, 256)),
}


def dataset(name: str) -> Tensor:
    """Rows for a long pass, of which there is one in memory."""
    row = MODELS[name][3]
    kind = torch.int64 if name == "GPT" else torch.float32
    return torch.ones(1, *row, dtype=kind).expand(1 << 20, *row)


def loss(model: Any, batch: Any) -> Tensor:
    """A mean over all outputs."""
    return model(batch.data).float().square().mean()
