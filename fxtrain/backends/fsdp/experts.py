"""Expert parallelism over data ranks: tokens travel to the ranks that hold their experts.

The ranks of a replica form groups of `FSDP(expert=...)` ranks. Each rank of a group has its own
tokens and some of the experts of every mixture. An all-to-all sends each token to the ranks of its
experts, which compute with the module's own forward, and a second one returns the outputs. No token
is dropped. Ranks of different groups hold the same experts, sharded between them by fully_shard.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from fxtrain.backends.core.device_mesh import (
    DistributedParameters,
    distribute_parameter,
    hide_local,
    show_local,
)
from fxtrain.backends.tensor import is_mixture
from fxtrain.state import FSDP, DistContext


def expert_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The mixtures of experts in a module, by name."""
    return {name: part for name, part in module.named_modules() if is_mixture(part)}


def expert_problems(ctx: DistContext, config: FSDP, module: nn.Module, replica: int) -> list[str]:
    """Problems with spreading the experts of a module over ranks.

    Args:
        replica: Ranks that hold one replica.
    """
    n, asked = config.expert, f"FSDP(expert={config.expert})"
    if n is None or ctx.world_size == 1:
        return []
    problems: list[str] = []
    if config.tensor is not None or ctx.mesh.context > 1 or config.mode == "none":
        problems.append(
            f"{asked} cannot be combined with tensor or context parallelism, nor with mode='none'. "
            f"To split experts over the tensor axis, use fx.Style(style='expert')."
        )
    if replica % n:
        problems.append(
            f"{asked} needs replicas of a multiple of {n} ranks, but one has {replica}. Use a "
            f"divisor of {replica}."
        )
    mixtures = expert_modules(module)
    if not mixtures:
        problems.append(
            f"{asked}: {type(module).__name__} has no mixture of experts. One is a module that has "
            f"the stacked weights of all its experts, their number as num_experts, and takes "
            f"(tokens, experts of each, weights of those). Omit expert."
        )
    for name, part in mixtures.items():
        count: Any = part.num_experts
        outer = max(replica // n, 1)
        if count % n:
            problems.append(
                f"{asked}: {name} has {count} experts, which {n} ranks do not divide. Use a "
                f"divisor of {count}."
            )
        elif any(_shard_dim(p, count // n, outer) is None for p in part.parameters(recurse=False)):
            problems.append(
                f"{asked}: the other {outer} ranks of a replica divide neither the {count // n} "
                f"experts of a rank in {name} nor their second dimension. Use expert={replica}."
            )
    return problems


def _shard_dim(parameter: Tensor, here: int, outer: int) -> int | None:
    """The dimension that the ranks with the same experts shard, evenly."""
    if here % outer == 0:
        return 0
    return 1 if parameter.ndim > 1 and parameter.shape[1] % outer == 0 else None


def shard_experts(
    part: nn.Module, mesh: DeviceMesh, ctx: DistContext, options: Mapping[str, Any]
) -> bool:
    """Give each rank its experts of a mixture, and shard those over the ranks that hold the same.

    Args:
        mesh: Of the axes replicate (if there are replicas), shard and expert.
        options: Of fully_shard.

    Returns:
        Whether fully_shard holds them. Where no other rank holds the same ones, and they compute in
        their own dtype, it would only copy parameters and gradients.

    Effects:
        Replaces parameters by DTensors, and adds hooks that send tokens and outputs.
    """
    group = mesh["expert"]
    count: Any = part.num_experts
    here, outer = count // group.size(), mesh["shard"].size()
    names = [name for name, _ in part.named_parameters(recurse=False)]
    distributed: DistributedParameters = {}
    for name in names:
        distribute_parameter(part, name, group, Shard(0), distributed)
    _add_hooks(part, names, group, here, ctx)
    offloaded = isinstance(options["offload_policy"], CPUOffloadPolicy)
    if options["mesh"].size() == 1 and options["mp_policy"].param_dtype is None and not offloaded:
        return False
    fully_shard(
        part,
        shard_placement_fn=lambda parameter: Shard(_shard_dim(parameter, here, outer) or 0),
        **options,
    )
    return True


def _add_hooks(
    part: nn.Module, names: Sequence[str], mesh: DeviceMesh, here: int, ctx: DistContext
) -> None:
    signature, group = inspect.signature(part.forward), mesh.get_group()
    count: Any = part.num_experts
    open_forwards: list[tuple[Tensor, list[int], list[int], Tensor, torch.dtype]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tokens, index, weights, *rest = signature.bind(*args, **kwargs).args
        show_local(module, names)
        vars(module)["num_experts"] = here
        order = index.flatten().argsort(stable=True)
        sent, received, per_expert = _counts(index, here, group, ctx)
        open_forwards.append((order, sent, received, weights, tokens.dtype))
        rows = tokens[order // index.shape[1]]
        arrived = _AllToAll.apply(rows, sent, received, group, float(mesh.size()))
        local = torch.arange(here, device=index.device).repeat(mesh.size())
        local = local.repeat_interleave(per_expert, output_size=len(arrived))
        return (arrived, local[:, None], weights.new_ones(len(arrived), 1), *rest), {}

    def after(module: nn.Module, args: Any, _: Any, out: Any) -> Any:
        local = hide_local(module, names)
        vars(module)["num_experts"] = count
        if not open_forwards:
            return out
        order, sent, received, weights, dtype = open_forwards.pop()
        if not isinstance(out, Tensor):
            return out  # forward failed, and this hook was called to clean up
        if not len(out):  # backward runs the same collectives and reductions on all ranks
            out = out + sum([unused[:0].sum() for unused in (args[0], *local)])
        back = _AllToAll.apply(out, received, sent, group, 1 / mesh.size())
        each = torch.empty_like(back).index_copy(0, order, back)
        weighted = each.view(*weights.shape, -1) * weights[..., None]
        return weighted.to(dtype).sum(1)

    part.register_forward_pre_hook(before, with_kwargs=True)
    part.register_forward_hook(after, with_kwargs=True, always_call=True)


def _counts(
    index: Tensor, here: int, group: Any, ctx: DistContext
) -> tuple[list[int], list[int], Tensor]:
    """How many tokens go to each rank, how many arrive from it, and those by sender and expert."""
    ranks, flat = group.size(), index.flatten()
    if ctx.comm.simulated:  # as if all ranks and experts were used alike
        each = [len(flat) // ranks] * ranks
        each[-1] += len(flat) % ranks
        arriving = torch.zeros(ranks, here, dtype=torch.int64, device=index.device)
        arriving[:, 0] = torch.tensor(each, device=index.device)
        return each, each, arriving.flatten()
    counts = torch.bincount(flat, minlength=ranks * here)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = torch.stack([counts, arriving]).view(2, ranks, here).sum(2).tolist()
    return sent, received, arriving


class _AllToAll(torch.autograd.Function):
    """Rows sent to each rank of a group; backward returns gradients, times a factor.

    The factors of the two directions cancel for the gradients of tokens. They leave those of the
    experts divided by the ranks of the group, whose tokens they have seen: gradients are means
    over ranks, and fully_shard divides by the other ranks.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        state: Any, rows: Tensor, sent: list[int], received: list[int], group: Any, factor: float
    ) -> Tensor:
        state.sent, state.received, state.group, state.factor = sent, received, group, factor
        return _sent(rows, sent, received, group)

    @staticmethod
    def backward(state: Any, grad: Tensor) -> Any:  # type: ignore[override]
        back = _sent(grad, state.received, state.sent, state.group)
        return back * state.factor, None, None, None, None


def _sent(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
    return out
