"""A small transformer with features that strategies must handle: tied, frozen and odd-sized
parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Transformer(nn.Module):
    """A causal language model of a few thousand parameters.

    The head is tied to the embedding. `poke` scales the gradient of element 0 of `gain` only, so
    that a test can make one element overflow, on the one shard that contains it.

    Args:
        seed: Seed of the parameters' values, which depend on nothing else.
        tied: Whether the head shares the embedding's weight.
        frozen: Whether the position embedding is frozen.
        dtype: Dtype of the parameters.
        blocks: Number of layers.
        width: Number of features; a multiple of 4.

    Example:
        >>> import torch
        >>> from fxtrain.testing import Transformer
        >>> net = Transformer()
        >>> net(torch.zeros(2, 6, dtype=torch.int64)).shape
        torch.Size([2, 6, 24])
        >>> net.head.weight is net.embed.weight
        True
    """

    VOCABULARY = 24
    WIDTH = 16
    LENGTH = 8

    def __init__(
        self,
        *,
        seed: int = 0,
        tied: bool = True,
        frozen: bool = False,
        dtype: torch.dtype = torch.float64,
        blocks: int = 2,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCABULARY, width, dtype=dtype)
        self.position = nn.Parameter(torch.empty(self.LENGTH, width, dtype=dtype))
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(blocks))
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.gain = nn.Parameter(torch.empty(width, dtype=dtype))
        self.head = Head(width, self.VOCABULARY, bias=False, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight
        self.position.requires_grad_(not frozen)
        self._fill(seed)

    @torch.no_grad()
    def _fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.is_meta:
                return
            # Drawn in one dtype, so that models of different dtypes have equal initial values.
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn * 0.3)

    def forward(self, tokens_BT: Tensor, poke: float | None = None) -> Tensor:
        x_BTD = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD) * (1 + self.gain))
        if poke is None:
            return logits_BTV
        # Adds zero to one logit. Only the gradient of `gain[0]` is of the order of `poke`, in
        # float64 until it reaches `first`.
        first = self.gain[0].float()
        column_V = torch.zeros_like(logits_BTV[0, 0], dtype=torch.float64)
        column_V[0] = poke
        return logits_BTV + ((first - first.detach()) * column_V).to(logits_BTV.dtype)


class Head(nn.Linear):
    """Logits divided by two; a separate class, so that plans can name it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


class Block(nn.Module):
    """Causal attention, then two linear layers."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, dtype=dtype)
        self.attention = Attention(width, dtype)
        self.norm_2 = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Attention(nn.Module):
    """Causal self-attention with separate projections; their width sets the number of heads."""

    HEAD = 4

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.q = nn.Linear(width, width, dtype=dtype)
        self.k = nn.Linear(width, width, dtype=dtype)
        self.v = nn.Linear(width, width, dtype=dtype)
        self.o = nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The number of heads is inferred: under tensor parallelism, a rank has a part of them.
        parts = (part(x_BTD).unflatten(-1, (-1, self.HEAD)) for part in (self.q, self.k, self.v))
        q_BHTC, k_BHTC, v_BHTC = (part.transpose(1, 2) for part in parts)
        mixed_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC, is_causal=True)
        return self.o(mixed_BHTC.transpose(1, 2).flatten(2))
