"""Mixtures of experts: their matrix products, and two ways to balance their load.

`fx.wrap` spreads a mixture over ranks (`FSDP(expert=...)`, `Style(style="expert")`) if its module
has the stacked weights of all its experts, their number as `num_experts`, and a forward that takes
tokens (T, D), the experts of each (T, K) and their weights (T, K). `mix` is such a forward.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fxtrain import ops
from fxtrain.backends.tensor import count_routes, is_mixture
from fxtrain.errors import PlanError
from fxtrain.ops.placeholders import runs_placeholders
from fxtrain.state import Wrapped
from fxtrain.state.wrapped import check_open

__all__ = ["balance_bias", "balance_loss", "mix"]
__dir__ = __all__.copy  # for completion


Product = Callable[[Tensor, Tensor], Tensor]


def mix(
    tokens: Tensor,
    index: Tensor,
    weights: Tensor,
    num_experts: int,
    compute: Callable[[Tensor, Product], Tensor],
) -> Tensor:
    """Send tokens through their experts, and sum the outputs with their weights.

    Args:
        tokens: (T, D).
        index: (T, K), the experts of each token; `num_experts` means none.
        weights: (T, K), of those experts.
        num_experts: E.
        compute: (rows, product) → outputs of the rows, which are the tokens sorted by their
            experts. `product(rows, weight)` multiplies each row by the matrix of its expert, with
            a weight of shape (E, in, out).

    Returns:
        (T, the outputs' width), with the dtype of the tokens.

    Effects:
        A product is one grouped matrix product on NVIDIA GPUs from compute capability 8.0, in
        bf16, with widths that are multiples of 8. Elsewhere it is a loop over experts, and the host
        waits once for the number of rows of each.

    Source:
        torch.nn.functional.grouped_mm.

    Example:
        >>> import torch, fxtrain as fx
        >>> weight = torch.stack([torch.eye(2), 10 * torch.eye(2)])
        >>> tokens, index = torch.ones(3, 2), torch.tensor([[0, 1], [1, 0], [1, 2]])
        >>> weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0]])
        >>> fx.experts.mix(tokens, index, weights, 2, lambda rows, product: product(rows, weight))
        tensor([[ 5.5000,  5.5000],
                [10.0000, 10.0000],
                [10.0000, 10.0000]])
    """
    chosen, flat = index.shape[1], index.flatten()
    order = flat.argsort(stable=True)
    counts = count_routes(index, num_experts + 1)[:num_experts]
    if _has_grouped_products(tokens):
        real = torch.arange(len(order), device=order.device)[:, None] < counts.sum()
        out = compute(tokens[order // chosen], _grouped(counts, real))
        out = torch.where(real, out, 0)
    else:
        sizes = _sizes(counts, len(flat))
        order = order[: sum(sizes)]
        out = compute(tokens[order // chosen], _looped(sizes))
    each = out.new_zeros(len(flat), out.shape[1]).index_copy(0, order, out)
    weighted = each.view(*index.shape, out.shape[1]) * weights[..., None]
    return weighted.sum(1).to(tokens.dtype)


def _has_grouped_products(tokens: Tensor) -> bool:
    if not tokens.is_cuda or not hasattr(F, "grouped_mm"):
        return False
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else tokens.dtype
    capable = torch.version.hip is None and torch.cuda.get_device_capability(tokens.device)[0] >= 8
    return capable and dtype is torch.bfloat16


def _sizes(counts: Tensor, routes: int) -> list[int]:
    """The number of rows of each expert; in a dry run, where it is unknown, about the same."""
    if isinstance(counts, FakeTensor):
        experts = len(counts)
        return [routes * (e + 1) // experts - routes * e // experts for e in range(experts)]
    return counts.tolist()


def _looped(sizes: Sequence[int]) -> Product:
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([part @ weight[e] for e, part in enumerate(rows.split(sizes))])

    return product


def _grouped(counts: Tensor, real: Tensor) -> Product:
    """Grouped products; `real` marks the rows of experts.

    The last rows, of no expert, and their gradients are left unset by torch. Each product takes
    zeros in their place, whose gradients go nowhere.
    """
    ends, read = counts.cumsum(0).int(), functools.cache(counts.tolist)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        # Autocast does not know grouped_mm.
        rows, weight = torch.where(real, rows, 0).bfloat16(), weight.bfloat16()
        if weight.shape[1] % 8 or weight.shape[2] % 8:  # it needs rows of whole 16 bytes
            sizes = read()
            out = _looped(sizes)(rows[: sum(sizes)], weight)
            return F.pad(out, (0, 0, 0, len(rows) - len(out)))
        return F.grouped_mm(rows, weight, offs=ends)

    return product


def balance_loss(
    logits: Tensor | Sequence[Tensor],
    model: Wrapped,
    *,
    top_k: int,
    mask: Tensor | None = None,
) -> Tensor:
    """The load-balancing loss of the Switch Transformer over the tokens of all ranks.

    A layer has E · Σ f·p, where f is the mean number of choices of an expert by a token, and p the
    mean probability of it. f is counted over all ranks, so with the token weights below, losses
    and gradients equal those of one process with the same micro-batches.

    Args:
        logits: (T, E) of a router, before softmax; or those of several layers, of which the mean
            is taken. Models of transformers return them with `output_router_logits=True`.
        model: The wrapped model, as the loss function gets it. Its micro-batch says whether this
            rank has rows.
        top_k: Experts of a token.
        mask: T entries of any shape, nonzero for tokens that count; None for all.

    Returns:
        A scalar with gradient, `top_k` if all experts are used equally. Add it to a mean loss, or,
        where the loss function returns `fx.Weighted`, times the weight:
        `fx.Weighted(total + 0.01 * balance * count, count)`.

    Effects:
        One reduction of one number per expert and layer over the ranks, all of which call it.

    Raises:
        StepError: `model` is no wrapped model, or was unwrapped.

    Source:
        https://arxiv.org/abs/2101.03961, equations 4 to 6.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(4, 4), ctx)
        ...     fx.experts.balance_loss(torch.eye(4), model, top_k=1)
        tensor(1.)
    """
    check_open(model, "experts.balance_loss")
    layers = [logits] if isinstance(logits, Tensor) else list(logits)
    count = layers[0].shape[-1]
    kept = torch.ones(len(layers[0]), device=layers[0].device)
    kept = kept if mask is None else mask.flatten().to(kept)
    if runs_placeholders(model.status):
        kept = torch.zeros_like(kept)  # a rank without rows
    probabilities = torch.stack([layer.float().softmax(-1) for layer in layers])
    index = probabilities.topk(top_k, dim=-1).indices
    chosen = F.one_hot(index, count).sum(-2) * kept[:, None]
    sums = torch.cat([chosen.sum(1).flatten(), kept.sum()[None]])
    sums = ops.reduce(sums, model.ctx.axis("loss"), op="sum")
    fraction = (sums[:-1] / sums[-1].clamp(min=1)).view(len(layers), count)
    mean = (probabilities * kept[:, None]).sum(1) / kept.sum().clamp(min=1)
    return count * (fraction * mean).sum(-1).mean()


def balance_bias(
    module: nn.Module, *, bias: str, rate: float
) -> Callable[[Wrapped], dict[str, Tensor]]:
    """Balance the load of experts without a loss, by biases of their scores.

    The router adds a bias to the scores from which it chooses experts, but not to the weights of
    their outputs. After each update, the bias of an expert with more than the mean number of
    tokens falls by `rate`, and that of one with fewer rises by it.

    Args:
        module: The user's module, before `fx.wrap`.
        bias: The name of the buffer of shape (E,) beside each mixture, such as
            "gate.e_score_correction_bias" of transformers' DeepSeek-V3. Keep it in fp32.
        rate: By how much a bias changes per update, such as 1e-3.

    Returns:
        A function `update(model)`, to call on all ranks after each update that was applied. It
        returns the tokens of each expert since its last call, over all ranks, by the name of the
        buffer; in a pipeline, those of the stages of this rank.

    Effects:
        Each mixture counts its tokens in backward. `update` reduces these counts over the ranks
        once.

    Raises:
        PlanError: there is no mixture, or one without such a buffer beside it.

    Source:
        https://arxiv.org/abs/2408.15664

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch import nn
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.num_experts, self.weight = 2, nn.Parameter(torch.ones(2, 3, 3))
        ...     def forward(self, tokens, index, weights):
        ...         products = lambda rows, product: product(rows, self.weight)
        ...         return fx.experts.mix(tokens, index, weights, self.num_experts, products)
        >>> class Mixture(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate, self.experts = nn.Linear(3, 2), Experts()
        ...         self.register_buffer("bias", torch.tensor([1.0, 0.0]))
        ...     def forward(self, x):
        ...         scores = self.gate(x).sigmoid()
        ...         index = (scores + self.bias).topk(1).indices
        ...         return self.experts(x, index, scores.gather(1, index))
        >>> net = Mixture()
        >>> update = fx.experts.balance_bias(net, bias="bias", rate=0.25)
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(net, ctx, optimizer=torch.optim.AdamW)
        ...     fns = fx.StepFns(model, lambda model, batch: model(batch.data).sum())
        ...     if fx.step(ctx, fx.batch(torch.zeros(4, 3), ctx), fns).applied:
        ...         loads = update(model)
        >>> loads, net.bias
        ({'bias': tensor([4, 0])}, tensor([0.7500, 0.2500]))
    """
    counts: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        if is_mixture(part):
            target = f"{name.rpartition('.')[0]}.{bias}".lstrip(".")
            size = _bias_of(module, target, part).shape
            counts[target] = torch.zeros(size, dtype=torch.int64, device="cpu")
            part.register_forward_pre_hook(
                _counting(counts, target, part), with_kwargs=True, prepend=True
            )
    if not counts:
        raise PlanError(
            f"balance_bias: {type(module).__name__} has no mixture of experts. One is a module "
            f"that has the stacked weights of all its experts, their number as num_experts, and "
            f"takes (tokens, experts of each, weights of those)."
        )

    def update(model: Wrapped) -> dict[str, Tensor]:
        if model.plan.local is not None:
            raise PlanError(
                "balance_bias cannot be combined with Plan(local=...): replicas that train "
                "independently would share their counts. Remove one of them."
            )
        held = dict(model.module.named_buffers())  # of a pipeline, those of this rank's stages
        here = {name: n.to(held[name].device) for name, n in counts.items() if name in held}
        totals = ops.reduce(here, model.ctx.axis("loss"), op="sum")
        for target, total in totals.items():
            above = total.double().mean() - total
            held[target].add_(above.sign().to(held[target]), alpha=rate)
            counts[target].zero_()
        return totals

    return update


def _bias_of(module: nn.Module, target: str, part: nn.Module) -> Tensor:
    buffer: Any = dict(module.named_buffers()).get(target)
    wanted: Any = part.num_experts
    if buffer is None or tuple(buffer.shape) != (wanted,) or not buffer.is_floating_point():
        what = (
            "no such buffer" if buffer is None else f"{buffer.dtype} of shape {list(buffer.shape)}"
        )
        raise PlanError(
            f"balance_bias: {target} should be a floating-point buffer of shape [{wanted}], found "
            f"{what}. Register it in the router, and add it to the scores that choose experts."
        )
    return buffer


def _counting(counts: dict[str, Tensor], target: str, part: nn.Module) -> Callable[..., None]:
    """A hook before the forward of a mixture; pipelines copy modules, and this function not.

    It counts in backward, which reaches each forward of training once: not one of shapes only, nor
    one that is computed again.
    """
    signature, size = inspect.signature(part.forward), len(counts[target])

    def count(part: nn.Module, args: Any, kwargs: Any) -> None:
        tokens, index, weights = signature.bind(*args, **kwargs).args[:3]
        trained = next((value for value in (weights, tokens) if value.requires_grad), None)
        if trained is None or isinstance(index, FakeTensor):
            return
        chosen = count_routes(index, size + 1)[:size]

        def add(_: Tensor) -> None:
            counts[target] = counts[target].to(chosen.device) + chosen

        trained.register_hook(add)

    return count
