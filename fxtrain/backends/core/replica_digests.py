"""Whether ranks that hold the same tensors hold the same bits, and how to repair those that do not.

Hardware that computes or stores a wrong number raises no error: the replicas of a model differ from
then on, and gradients of both are averaged. Every rank computes a digest of each of its parameters
and optimizer states. Ranks whose part of a tensor is the same part compare theirs: the replicas of
DDP, those of the `replicate` axis under FSDP, and tensors that tensor parallelism replicates.
"""

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from fxtrain.backends.core.optimizer_state import optimizer_state, parameter_names
from fxtrain.backends.core.optimizers import local_optimizer
from fxtrain.errors import StepError
from fxtrain.ops import tensor_bytes
from fxtrain.ops.logs import log
from fxtrain.ops.objects import gather_objects
from fxtrain.ops.transport.exchange import rank_loss_guard, settle
from fxtrain.ops.transport.mismatches import by_rank, ranges
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import DistContext, Key, Wrapped
from fxtrain.state.keys import GRADIENTS, WEIGHTS

_CALL = ("verify_replicas", "")
_PIECE = 1 << 22  # elements of a tensor that are widened to int64 at a time
_SHOWN = 10  # differences that a message lists
_Digests = Mapping[str, Mapping[Key, str]]  # by part, then by key of a tensor


class Difference(NamedTuple):
    """A tensor that should be the same on some ranks, and is not.

    Attributes:
        part: Equal on the ranks that hold the same elements of the tensors of that part.
        key: Of the tensor.
        most: The ranks that hold what more than half of them hold; empty if there is none, or if a
            rank lacks the tensor.
        others: The other ranks.
    """

    part: str
    key: Key
    most: tuple[int, ...]
    others: tuple[int, ...]


def verify_replicas(model: Wrapped, *, before_update: bool = False) -> None:
    """Compare parameters and optimizer states between the ranks that hold replicas of them.

    Called by every rank at the same update, as `Plan.verify_replicas` says.

    Args:
        model: The wrapped model.
        before_update: Whether the optimizers run next. Then gradients, which the ranks have
            averaged, are compared too.

    Effects:
        Reads every parameter and optimizer state once, and one exchange of objects; one more if
        there are differences. Under `Plan(replicas_differ="heal")`, tensors that
        differ from those of most ranks are overwritten with theirs, which is logged.

    Raises:
        StepError: replicas differ, and the plan does not heal them or no majority agrees; on every
            rank.
    """
    ctx = model.ctx
    if ctx.world_size == 1 or ctx.comm.simulated:
        return
    digests = digests_of(model, gradients=before_update)
    differing = _differing_parts(ctx, digests)
    if not differing:
        return
    local = {part: found for part, found in digests.items() if part in differing}
    rows = gather_objects((platform.node(), local), ctx)
    differences = differences_of([found for _, found in rows])
    hosts = {rank: host for rank, (host, _) in enumerate(rows) if ctx.num_nodes > 1}
    lines, update = describe_differences(differences, hosts), model.window.updates
    when = f"before update {update + 1}" if before_update else f"after update {update}"
    cure = (
        "Continue from a checkpoint that was saved before, such as with `fxtrain launch "
        "--restarts`. `fxtrain replay --times 2` of the updates since then tells a faulty "
        "machine from a bug."
    )
    if model.plan.replicas_differ == "heal":
        undecided = next((_shown_name(each.key) for each in differences if not each.most), None)
        if undecided is None:
            _heal(ctx, _tensors_by_part(model, gradients=before_update), differences)
            log(ctx, "fxtrain.replicas").warning(
                "Replicas differed %s; most ranks' values were copied to the others:\n%s",
                when,
                "\n".join(lines),
            )
            return
        cure = f"No majority of ranks agrees on {undecided}, so nothing was overwritten. {cure}"
    raise StepError(
        "\n".join([f"Replicas differ {when} ({ctx.world_size} ranks):", *lines, cure]),
        code="FX506",
    )


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """A digest of the shape, dtype and bits of each tensor, whatever its strides.

    On a CPU it is XXH3 of its memory. Elsewhere it is computed on the device: sums of the elements'
    bits as 32-bit integers, each multiplied by its position, modulo 2^64. A change of a bit changes
    such a sum, and so does swapping two elements, since a product of a position and a difference of
    two such integers is less than 2^64. Both hold for tensors of up to 2^31 elements.

    Effects:
        The host waits for the device once, whatever the number of tensors.
    """
    sums = [weighted_sums(tensor) for tensor in tensors if tensor.device.type != "cpu"]
    read = torch.cat([each.to(sums[0].device) for each in sums]).cpu() if sums else None
    rows = iter(() if read is None else read.split([len(each) for each in sums]))
    return [
        tensor_bytes.digest(tensor)
        if tensor.device.type == "cpu"
        else f"{tensor.dtype} {list(tensor.shape)} {next(rows).tolist()}"
        for tensor in tensors
    ]


def weighted_sums(tensor: Tensor) -> Tensor:
    """Sums of the bits of a tensor's elements, weighted by their positions.

    Returns:
        int64, on the tensor's device, shape (n,): one sum for each 32 bits of an element; one for
        elements of fewer bits.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = values.as_strided((values.numel(),), (1,))  # one element may have any stride
    size = tensor.element_size()
    words = max(1, size // 4)
    bits = flat.view({1: torch.uint8, 2: torch.int16}.get(size, torch.int32)).view(-1, words)
    sums = torch.zeros(words, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64)
        places = torch.arange(1 + start, 1 + start + len(piece), device=tensor.device)
        sums += (piece * places[:, None]).sum(0)
    return sums


def digests_of(model: Wrapped, *, gradients: bool = False) -> dict[str, dict[Key, str]]:
    """Digests of parameters and optimizer states of this rank, by part and by key."""
    parts = _tensors_by_part(model, gradients=gradients)
    every = iter(digests([tensor for tensors in parts.values() for tensor in tensors.values()]))
    return {part: dict(zip(tensors, every, strict=False)) for part, tensors in parts.items()}


def _tensors_by_part(model: Wrapped, *, gradients: bool) -> dict[str, dict[Key, Tensor]]:
    """This rank's elements of parameters and optimizer states, live, by part and by key.

    Others may hold replicas of them.
    """
    now = model.status.replica
    # Stages have tensors of their own, and so do replicas that train independently.
    where = f"{model.ctx.axis('pipeline').rank} {() if now is None else now.peers}"
    named = dict(model.module.named_parameters())
    tensors: dict[Key, Any] = {Key(WEIGHTS, name): value for name, value in named.items()}
    if gradients:
        grads = {Key(GRADIENTS, name): parameter.grad for name, parameter in named.items()}
        tensors |= {key: grad for key, grad in grads.items() if grad is not None}
    names = parameter_names(model.module)
    for index, optimizer in enumerate(model.optimizers):
        if local_optimizer(optimizer) is optimizer:  # otherwise each state is on one rank only
            tensors |= optimizer_state(optimizer, index, names)[0]
    parts: dict[str, dict[Key, Tensor]] = {}
    for key, tensor in tensors.items():
        parts.setdefault(f"{where} {_shard(tensor)}", {})[key] = local_values(tensor)
    return parts


def _shard(tensor: Tensor) -> str:
    """Which shard of a tensor this rank holds: its place on the axes that do not replicate it."""
    if not isinstance(tensor, DTensor):
        return ""
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    place = mesh.get_coordinate() or ()
    split = zip(axes, place, tensor.placements, strict=True)
    return " ".join(f"{axis}={at} {how}" for axis, at, how in split if not how.is_replicate())


def _differing_parts(ctx: DistContext, digests: _Digests) -> set[str]:
    """The parts whose digests differ on some ranks; equal on every rank."""
    sums = {
        part: hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=16).digest()
        for part, found in digests.items()
    }
    seen: dict[str, bytes] = {}
    return {
        part
        for row in gather_objects(sums, ctx)
        for part, found in row.items()
        if seen.setdefault(part, found) != found
    }


def differences_of(rows: Sequence[_Digests]) -> list[Difference]:
    """What differs, of the digests of all ranks."""
    differences: list[Difference] = []
    for part in sorted({part for row in rows for part in row}):
        holders = [rank for rank, row in enumerate(rows) if part in row]
        for key in sorted({key for rank in holders for key in rows[rank][part]}):
            values = {rank: rows[rank][part].get(key) for rank in holders}
            counts: dict[str | None, list[int]] = {}
            for rank, value in values.items():
                counts.setdefault(value, []).append(rank)
            if len(counts) == 1:
                continue
            most = max(counts.values(), key=len)
            most = most if 2 * len(most) > len(holders) and None not in counts else []
            others = [rank for rank in holders if rank not in most]
            differences.append(Difference(part, key, tuple(most), tuple(others)))
    return differences


def describe_differences(differences: Sequence[Difference], hosts: Mapping[int, str]) -> list[str]:
    """Lines that name ranks, hosts and tensors: one for each set of ranks that differs."""
    names: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for difference in differences:
        ranks = difference.others, difference.most
        names.setdefault(ranks, []).append(_shown_name(difference.key))
    lines = []
    for (others, most), tensors in names.items():
        more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
        from_ = f"from those of ranks {ranges(list(most))}" if most else "between them"
        differ = "1 tensor differs" if len(tensors) == 1 else f"{len(tensors)} tensors differ"
        text = f"{differ} {from_}: {', '.join(tensors[:_SHOWN])}{more}"
        lines += by_rank(((rank, text) for rank in others), hosts)
    return lines


def _shown_name(key: Key) -> str:
    return key.name if key.kind == WEIGHTS else str(key)


def _heal(
    ctx: DistContext,
    tensors: Mapping[str, Mapping[Key, Tensor]],
    differences: Iterable[Difference],
) -> None:
    """Overwrite what differs with what most ranks hold."""
    settle(ctx)
    with rank_loss_guard(ctx, _CALL), torch.no_grad():
        for difference in differences:
            source = difference.most[0]
            if ctx.rank != source and ctx.rank not in difference.others:
                continue
            tensor = tensors[difference.part][difference.key]
            values = tensor_bytes.contiguous(tensor).clone()
            octets = torch.frombuffer(tensor_bytes.memory_of(values), dtype=torch.uint8)
            if ctx.rank == source:
                for rank in difference.others:
                    dist.send(octets, ctx.comm.ranks[rank], group=ctx.comm.control)
            else:
                dist.recv(octets, ctx.comm.ranks[source], group=ctx.comm.control)
                tensor.copy_(values)
