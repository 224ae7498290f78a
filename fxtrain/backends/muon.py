"""torch's Muon on several ranks: each matrix is orthogonalized once, on one of the ranks.

An update of Muon is a function of a whole matrix, and its products cost more than those of the
other optimizers. Where ranks hold shards of a matrix, one of them gets all shards, computes the
update, and returns to the others their parts. Where ranks hold replicas, one of them computes the
update and sends it to the others. Both ways carry bf16, in which torch computes the products, so
the update has the bits of one process with the same gradients.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from fxtrain._display import counted
from fxtrain.backends.core.device_mesh import group_of_mesh, open_stage_group
from fxtrain.errors import PlanError
from fxtrain.ops.splitting import shard_box
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import DistContext

_Shard = tuple[tuple[slice, slice], int]  # rows and columns, and which replica they belong to


class _Matrix:
    """A parameter, and the ranks that share the work on it.

    Attributes:
        device: Of the group, also where shards are offloaded to the host.
        group: The process group; None if this rank computes alone.
        here: This rank of it.
        shards: What each of its ranks holds.
        is_sharded: Whether several ranks hold one replica.
    """

    def __init__(self, parameter: Tensor, ctx: DistContext, replicas: Any) -> None:
        self.parameter, self.device, self.group = parameter, parameter.device, replicas
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            self.device, self.group = torch.device(mesh.device_type), group_of_mesh(mesh, ctx)
            self.shards = _shards(parameter.shape, tuple(mesh.shape), parameter.placements)
        else:
            whole = slice(0, parameter.shape[0]), slice(0, parameter.shape[1])
            self.shards = tuple((whole, n) for n in range(replicas.size() if replicas else 1))
        self.here: int = self.group.rank() if self.group else 0
        self.is_sharded = len({replica for _, replica in self.shards}) < len(self.shards)

    def shape(self, rank: int) -> list[int]:
        """The shape of a rank's shard."""
        return [at.stop - at.start for at in self.shards[rank][0]]

    def sends(self, rank: int, owner: int) -> bool:
        """Whether the owner needs the shard of a rank, and not that of another replica."""
        return self.shards[rank][1] == self.shards[owner][1]


class Muon(torch.optim.Muon):
    """torch's Muon with the same groups and states, whose work is divided over ranks.

    Args:
        made: The user's optimizer.
        replicas: A process group whose ranks hold replicas of every parameter that is not a
            DTensor, with equal gradients; None if there is none.
    """

    def __init__(self, made: torch.optim.Muon, ctx: DistContext, replicas: Any) -> None:
        # Checked by torch's own constructor before; schedulers read the defaults.
        torch.optim.Optimizer.__init__(self, made.param_groups, made.defaults)
        self.state.update(made.state)
        self._optimizer_step_pre_hooks.update(made._optimizer_step_pre_hooks)
        self._optimizer_step_post_hooks.update(made._optimizer_step_post_hooks)
        self._ctx, self._replicas = ctx, replicas
        self._matrices: dict[Tensor, _Matrix] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, the same ones on every rank.

        Effects:
            Between the ranks of a mesh over which matrices are sharded, an all-to-all of shards and
            one of results, and between replicas one of results, all of bf16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[Any, list[_Matrix]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    matrix = self._matrix(parameter)
                    together.setdefault(matrix.group, []).append(matrix)
            for matrices in together.values():
                owners = _owners(matrices)
                momenta = [
                    self._momentum(matrix, owner, group)
                    for matrix, owner in zip(matrices, owners, strict=True)
                ]
                updates = _orthogonalized(matrices, owners, momenta, group)
                for matrix, update in zip(matrices, updates, strict=True):
                    self._change(matrix.parameter, update, group)
        return loss

    def _momentum(self, matrix: _Matrix, owner: int, group: Mapping[str, Any]) -> Tensor | None:
        """Update the momentum; what is orthogonalized of it, in bf16, if the owner needs it."""
        state, gradient = self.state[matrix.parameter], matrix.parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        grad, buffer = local_values(gradient), local_values(state["momentum_buffer"])
        buffer.lerp_(grad, 1 - group["momentum"])
        if not matrix.sends(matrix.here, owner):
            return None
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return update.to(matrix.device, torch.bfloat16, copy=True)

    def _change(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        lr = float(group["lr"])
        weights = local_values(parameter)
        weights.mul_(1 - lr * group["weight_decay"])
        rate = lr * _rate_of(group["adjust_lr_fn"], parameter.shape)
        weights.add_(update.to(weights.device), alpha=-rate)

    def _matrix(self, parameter: Tensor) -> _Matrix:
        if parameter not in self._matrices:
            self._matrices[parameter] = _Matrix(parameter, self._ctx, self._replicas)
        return self._matrices[parameter]


def divide_muon(made: Any, ctx: DistContext, replicas: Any = None) -> Any:
    """torch's Muon, or one that divides its work over ranks where they share matrices."""
    open_stage_group(ctx)
    sharded = any(isinstance(p, DTensor) for group in made.param_groups for p in group["params"])
    return Muon(made, ctx, replicas) if sharded or replicas is not None else made


def not_matrices(named: Sequence[tuple[str, Tensor]]) -> PlanError:
    """An error that names the parameters that Muon does not take."""
    others = [name for name, parameter in named if parameter.ndim != 2]
    verb = "is not a matrix" if len(others) == 1 else "are not matrices"
    return PlanError(
        f"wrap(optimizer=...): torch's Muon updates matrices, and "
        f"{counted(len(others), 'parameter')} {verb}: {', '.join(others[:5])}"
        f"{', ...' if len(others) > 5 else ''}. Give these to a second optimizer, with "
        f"embeddings and the output layer: [torch.optim.Muon(matrices), "
        f"torch.optim.AdamW(others)]."
    )


@functools.lru_cache(maxsize=64)  # a model has many matrices of few shapes, on up to 1000s of ranks
def _shards(
    whole: torch.Size, sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> tuple[_Shard, ...]:
    """What each rank of a mesh of these sizes holds of a matrix."""
    shards: list[_Shard] = []
    replicas: dict[tuple[int, ...], int] = {}
    for place in itertools.product(*map(range, sizes)):
        start, shape = shard_box(whole, sizes, place, placements)
        rows, columns = (slice(at, at + n) for at, n in zip(start, shape, strict=True))
        replica = tuple(i for i, how in zip(place, placements, strict=True) if how.is_replicate())
        shards.append(((rows, columns), replicas.setdefault(replica, len(replicas))))
    return tuple(shards)


def _owners(matrices: Sequence[_Matrix]) -> list[int]:
    """For each matrix, the rank that computes it: the one with the least work so far."""
    # Multiplications of one iteration, up to a constant.
    work = [min(m.parameter.shape) ** 2 * max(m.parameter.shape) for m in matrices]
    load = [0] * len(matrices[0].shards)
    owners = [0] * len(matrices)
    for index in sorted(range(len(matrices)), key=lambda index: -work[index]):
        owners[index] = load.index(min(load))
        load[owners[index]] += work[index]
    return owners


def _orthogonalized(
    matrices: Sequence[_Matrix],
    owners: Sequence[int],
    momenta: Sequence[Tensor | None],
    options: Mapping[str, Any],
) -> list[Tensor]:
    """This rank's shard of each orthogonalized matrix.

    Args:
        matrices: All of the same group.
        momenta: This rank's shards; None where the owner does not need it.
    """
    one, ranks = matrices[0], range(len(matrices[0].shards))
    sent: list[list[Any]] = [[] for _ in ranks]
    results: list[list[Any]] = [[] for _ in ranks]
    shapes: list[list[list[int]]] = [[] for _ in ranks]
    for matrix, owner, momentum in zip(matrices, owners, momenta, strict=True):
        shapes[owner].append(matrix.shape(one.here))
        if matrix.sends(one.here, owner):
            sent[owner].append(momentum)
    owned = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == one.here]
    parts = [[each.shape(rank) for each in owned if each.sends(rank, one.here)] for rank in ranks]
    arrived = _exchange(one, sent, parts, apart=not any(each.is_sharded for each in matrices))
    for matrix in owned:
        whole = torch.empty(matrix.parameter.shape, dtype=torch.bfloat16, device=matrix.device)
        for rank, (at, _) in enumerate(matrix.shards):
            if matrix.sends(rank, one.here):
                whole[at] = next(arrived[rank])
        update = _newton_schulz(
            whole, options["ns_coefficients"], options["ns_steps"], options["eps"]
        ).contiguous()  # of a tall matrix it is transposed, and slow to add
        for result, (at, _) in zip(results, matrix.shards, strict=True):
            result.append(update[at])
    arrived = _exchange(one, results, shapes, apart=len(ranks) == 1)
    return [next(arrived[owner]) for owner in owners]


def _newton_schulz(
    momentum: Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> Tensor:
    """A nearly orthogonal matrix, with the operations of torch's Muon, bit for bit.

    Changes `momentum`.

    Source:
        torch.optim.Muon.
    """
    a, b, c = coefficients
    tall = momentum.size(0) > momentum.size(1)
    matrix = momentum.T if tall else momentum
    matrix.div_(matrix.norm().clamp(min=eps))  # so that the spectral norm is at most 1
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(gram, gram, gram, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if tall else matrix


def _rate_of(adjust: str | None, shape: torch.Size) -> float:
    """By how much torch's Muon multiplies the learning rate of a matrix."""
    rows, columns = shape
    if adjust in (None, "original"):
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else 1.0


def _exchange(
    one: _Matrix, sent: list[list[Tensor]], shapes: list[list[list[int]]], *, apart: bool
) -> list[Iterator[Tensor]]:
    """Send tensors to each rank of a group; those received from each rank, of these shapes.

    Args:
        apart: Whether all are for this rank itself.
    """
    own, sent[one.here], shapes[one.here] = iter(sent[one.here]), [], []
    if apart:
        return [own if rank == one.here else iter(()) for rank in range(len(sent))]
    out = [[tensor.reshape(-1) for tensor in tensors] for tensors in sent]
    lengths = [[*map(math.prod, of_rank)] for of_rank in shapes]
    values = torch.empty(sum(map(sum, lengths)), dtype=torch.bfloat16, device=one.device)
    dist.all_to_all_single(
        values.view(torch.uint8),  # as bytes, since gloo has no bf16
        torch.cat([values[:0], *itertools.chain(*out)]).view(torch.uint8),
        [2 * sum(of_rank) for of_rank in lengths],
        [2 * sum(map(len, tensors)) for tensors in out],
        one.group,
    )
    pieces = iter(values.split([*itertools.chain(*lengths)]))
    received = [iter([next(pieces).view(shape) for shape in of_rank]) for of_rank in shapes]
    received[one.here] = own
    return received
