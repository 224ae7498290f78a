"""The decoders of train.py: Llama of transformers, and one whose MLPs are mixtures of experts."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxtrain as fx

# Width, width of an MLP or of an expert, layers, heads, heads of keys and values, experts.
SIZES = {
    "tiny": (64, 128, 4, 4, 2, 4),
    "100m": (768, 2048, 12, 12, 4, 8),
    "7b": (4096, 11008, 32, 32, 32, 8),
    "50b": (4096, 14336, 32, 32, 8, 8),  # as Mixtral 8x7B
}
CHOSEN = 2  # experts of a token


class Experts(nn.Module):
    """Gated MLPs, stacked."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        self.down = nn.Parameter(torch.empty(count, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        def mlp(rows: Tensor, product: Any) -> Tensor:  # the tokens sorted by expert
            gate, up = product(rows, self.gate_up).chunk(2, dim=-1)
            return product(F.silu(gate) * up, self.down)

        return fx.experts.mix(tokens, index, weights, self.num_experts, mlp)


class Mixture(nn.Module):
    """A router, and experts of which it chooses some for each token.

    The bias, which `fx.experts.balance_bias` changes, only decides which experts are chosen.
    """

    bias: Tensor
    logits: list[Tensor] | None = None  # to which each forward adds its own, (B * T, experts)

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count, width, inner)
        self.register_buffer("bias", torch.zeros(count))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        tokens = x_BTD.flatten(0, 1)
        logits = self.router(tokens)
        if self.logits is not None:
            self.logits.append(logits)
        scores = logits.float().sigmoid()
        index = (scores + self.bias).topk(CHOSEN).indices
        weights = scores.gather(1, index)
        weights = (weights / weights.sum(1, keepdim=True)).to(tokens.dtype)
        return self.experts(tokens, index, weights).view_as(x_BTD)


def decoder(kind: str, size: str, vocabulary: int, length: int) -> LlamaForCausalLM:
    width, inner, layers, heads, kv_heads, count = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        bos_token_id=cast(Any, None),
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    if kind == "moe":
        for layer in model.model.layers:
            layer.mlp = Mixture(count, width, inner)
    return model


@contextmanager
def router_logits(model: nn.Module) -> Generator[list[Tensor]]:
    """Collect the logits of all routers, in their order, for the balance loss.

    Only within the block, since kept logits of a layer that is recomputed in backward would keep
    its activations.
    """
    mixtures = [part for part in model.modules() if isinstance(part, Mixture)]
    collected: list[Tensor] = []
    for mixture in mixtures:
        mixture.logits = collected
    try:
        yield collected
    finally:
        for mixture in mixtures:
            mixture.logits = None
