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
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.optim import _muon

from fxtrain._display import counted
from fxtrain.errors import PlanError
from fxtrain.ops.whole_tensors import local_values

Place = tuple[int, ...]  # the index of a rank in each of several groups


@attrs.frozen(eq=False)
class _Matrix:
    """A parameter, and the ranks that share the work on it.

    Attributes:
        parameter: As the strategy holds it.
        device: Of the groups, also where shards are offloaded to the host.
        groups: Process groups of this rank, one for each dimension of a mesh.
        here: This rank.
        is_sharded: Of each group, whether its ranks hold shards; otherwise they hold replicas.
        shards: The rows and columns of each shard, by the place of the ranks that hold it.
    """

    parameter: Tensor
    device: torch.device
    groups: tuple[Any, ...]
    here: Place
    is_sharded: tuple[bool, ...]
    shards: Mapping[Place, tuple[slice, slice]]

    def place(self, rank: Place) -> Place:
        """The key in `shards` of a rank: its index is 0 in groups of replicas."""
        return tuple(i if s else 0 for i, s in zip(rank, self.is_sharded, strict=True))

    def shape(self, place: Place) -> tuple[int, ...]:
        return tuple(at.stop - at.start for at in self.shards[place])

    def sends(self, owner: Place, dim: int = 0) -> bool:
        """Whether this rank has shards for an owner after exchanges in the groups before `dim`.

        Of replicas, only those in the owner's place of the group send theirs.
        """
        return all(
            mine == index or (d >= dim and self.is_sharded[d])
            for d, (mine, index) in enumerate(zip(self.here, owner, strict=True))
        )

    def reached(self, dim: int, to: int) -> list[Place]:
        """The shards that this rank passes on to rank `to` of its group `dim`, in a fixed order.

        They are those of the ranks that are reached from there through the groups before `dim`.
        """
        fixed = self.place((*self.here[:dim], to, *self.here[dim + 1 :]))[dim:]
        return [place for place in self.shards if place[dim:] == fixed]


class Muon(torch.optim.Muon):
    """torch's Muon with the same groups and states, whose work is divided over ranks.

    Args:
        made: The user's optimizer.
        replicas: A process group whose ranks hold replicas of every parameter that is not a
            DTensor, with equal gradients; None if there is none.
    """

    def __init__(self, made: torch.optim.Muon, replicas: Any = None) -> None:
        # Checked by torch's own constructor before; schedulers read the defaults.
        torch.optim.Optimizer.__init__(self, made.param_groups, made.defaults)
        self.state.update(made.state)
        self._optimizer_step_pre_hooks.update(made._optimizer_step_pre_hooks)
        self._optimizer_step_post_hooks.update(made._optimizer_step_post_hooks)
        self._replicas = replicas
        self._matrices: dict[Tensor, _Matrix] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, the same ones on every rank.

        Effects:
            Two all-to-all exchanges for each dimension of the mesh in which the matrices are
            sharded, and one for each in which they are replicated, all of bf16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[tuple[Any, ...], list[_Matrix]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    matrix = self._matrix(parameter)
                    together.setdefault(matrix.groups, []).append(matrix)
            for matrices in together.values():
                owners = _owners(matrices)
                held = [
                    self._momentum(matrix, owner, group)
                    for matrix, owner in zip(matrices, owners, strict=True)
                ]
                _orthogonalize(matrices, owners, held, group)
                for matrix, shards in zip(matrices, held, strict=True):
                    self._change(matrix.parameter, shards[matrix.place(matrix.here)], group)
        return loss

    def _momentum(
        self, matrix: _Matrix, owner: Place, group: Mapping[str, Any]
    ) -> dict[Place, Tensor]:
        """Update the momentum; what is orthogonalized of it, in bf16, if this rank sends it."""
        state, gradient = self.state[matrix.parameter], matrix.parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        grad, buffer = local_values(gradient), local_values(state["momentum_buffer"])
        buffer.lerp_(grad, 1 - group["momentum"])
        if not matrix.sends(owner):
            return {}
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        return {matrix.place(matrix.here): update.to(matrix.device, torch.bfloat16, copy=True)}

    def _change(self, parameter: Tensor, update: Tensor, group: Mapping[str, Any]) -> None:
        lr = float(group["lr"])
        weights = local_values(parameter)
        weights.mul_(1 - lr * group["weight_decay"])
        rate = _muon._adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
        weights.add_(update.to(weights.device), alpha=-rate)

    def _matrix(self, parameter: Tensor) -> _Matrix:
        if parameter not in self._matrices:
            self._matrices[parameter] = _placed(parameter, self._replicas)
        return self._matrices[parameter]


def divide_muon(made: Any, replicas: Any = None) -> Any:
    """An optimizer that divides its work over ranks if it is torch's Muon; else the same one."""
    if type(made) is not torch.optim.Muon:
        return made
    sharded = any(isinstance(p, DTensor) for group in made.param_groups for p in group["params"])
    return Muon(made, replicas) if sharded or replicas is not None else made


@contextmanager
def matrices_named(named: Sequence[tuple[str, Tensor]]) -> Iterator[None]:
    """Around a factory: a PlanError that names the parameters that Muon does not take."""
    try:
        yield
    except ValueError as error:
        if "Muon only supports 2D" not in str(error):
            raise
        others = [name for name, parameter in named if parameter.ndim != 2]
        verb = "is not a matrix" if len(others) == 1 else "are not matrices"
        raise PlanError(
            f"wrap(optimizer=...): torch's Muon updates matrices, and "
            f"{counted(len(others), 'parameter')} {verb}: {', '.join(others[:5])}"
            f"{', ...' if len(others) > 5 else ''}. Give these to a second optimizer, with "
            f"embeddings and the output layer: [torch.optim.Muon(matrices), "
            f"torch.optim.AdamW(others)]."
        ) from error


def _placed(parameter: Tensor, replicas: Any) -> _Matrix:
    """Which ranks share the work on a parameter, and where its shards are."""
    if not isinstance(parameter, DTensor):
        everything = (slice(0, parameter.shape[0]), slice(0, parameter.shape[1]))
        groups = () if replicas is None else (replicas,)
        device = parameter.device
        is_sharded = (False,) * len(groups)
        shards: Mapping[Place, tuple[slice, slice]] = {(0,) * len(groups): everything}
    else:
        mesh = parameter.device_mesh
        device = torch.device(mesh.device_type)
        is_sharded = tuple(not placement.is_replicate() for placement in parameter.placements)
        groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
        shards = _shards(parameter.shape, tuple(mesh.shape), parameter.placements)
    here = tuple(group.rank() for group in groups)
    return _Matrix(parameter, device, groups, here, is_sharded, shards)


@functools.lru_cache(maxsize=64)  # a model has many matrices of few shapes, on up to 1000s of ranks
def _shards(
    whole: torch.Size, sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> Mapping[Place, tuple[slice, slice]]:
    """Rows and columns of each shard of a matrix on a mesh of these sizes."""
    counts = [
        1 if placement.is_replicate() else n for n, placement in zip(sizes, placements, strict=True)
    ]
    shards: dict[Place, tuple[slice, slice]] = {}
    for place in itertools.product(*map(range, counts)):
        shape, start = _compute_local_shape_and_global_offset(whole, sizes, list(place), placements)
        rows, columns = (slice(at, at + n) for at, n in zip(start, shape, strict=True))
        shards[place] = (rows, columns)
    return shards


def _orthogonalize(
    matrices: Sequence[_Matrix],
    owners: Sequence[Place],
    held: Sequence[dict[Place, Tensor]],
    options: Mapping[str, Any],
) -> None:
    """Exchange this rank's shard of each matrix for that of the orthogonalized one.

    Args:
        matrices: All of the same groups.
        held: The shards of each matrix that this rank holds, by place; changed in place.
    """
    dims = range(len(matrices[0].groups))
    for dim in dims:
        _move(matrices, owners, held, dim, back=False)
    for matrix, owner, shards in zip(matrices, owners, held, strict=True):
        if owner == matrix.here:
            update = _muon._zeropower_via_newtonschulz(
                _assembled(matrix, shards),
                options["ns_coefficients"],
                options["ns_steps"],
                options["eps"],
            ).contiguous()  # of a tall matrix it is transposed, and slow to add
            shards.update((place, update[at]) for place, at in matrix.shards.items())
    for dim in reversed(dims):
        _move(matrices, owners, held, dim, back=True)


def _owners(matrices: Sequence[_Matrix]) -> list[Place]:
    """For each matrix, the rank that computes it: the one with the least work so far."""
    # Multiplications of one iteration, up to a constant.
    work = [min(m.parameter.shape) ** 2 * max(m.parameter.shape) for m in matrices]
    ranks = itertools.product(*(range(group.size()) for group in matrices[0].groups))
    load = dict.fromkeys(ranks, 0)
    owners: dict[int, Place] = {}
    for index in sorted(range(len(matrices)), key=lambda index: -work[index]):
        owners[index] = min(load, key=lambda place: load[place])
        load[owners[index]] += work[index]
    return [owners[index] for index in range(len(matrices))]


def _assembled(matrix: _Matrix, shards: Mapping[Place, Tensor]) -> Tensor:
    if len(shards) == 1:  # replicas
        return next(iter(shards.values()))
    whole = torch.empty(matrix.parameter.shape, dtype=torch.bfloat16, device=matrix.device)
    for place, part in shards.items():
        whole[matrix.shards[place]] = part
    return whole


def _move(
    matrices: Sequence[_Matrix],
    owners: Sequence[Place],
    held: Sequence[dict[Place, Tensor]],
    dim: int,
    *,
    back: bool,
) -> None:
    """Send shards to the ranks of a group through which their owners are reached, or back."""
    group, me = matrices[0].groups[dim], matrices[0].here[dim]
    passing = [
        i
        for i, (matrix, owner) in enumerate(zip(matrices, owners, strict=True))
        if (
            owner[:dim] == matrix.here[:dim]
            if back
            else matrix.is_sharded[dim] and matrix.sends(owner, dim)
        )
    ]
    if not passing:
        return

    def shards(owner: int, rank: int) -> list[tuple[int, Place]]:
        """Those of a rank of the group, of the matrices whose owner another one reaches."""
        if owner == rank:  # they stay
            return []
        reached = [i for i in passing if owners[i][dim] == owner]
        return [(i, place) for i in reached for place in matrices[i].reached(dim, rank)]

    given = [shards(rank, me) for rank in range(group.size())]
    taken = [shards(me, rank) for rank in range(group.size())]
    sent, received = (taken, given) if back else (given, taken)
    out = [[held[i][place].reshape(-1) for i, place in keys] for keys in sent]
    lengths = [[math.prod(matrices[i].shape(place)) for i, place in keys] for keys in received]
    values = torch.empty(sum(map(sum, lengths)), dtype=torch.bfloat16, device=matrices[0].device)
    dist.all_to_all_single(
        values.view(torch.uint8),  # as bytes, since gloo has no bf16
        torch.cat([values[:0], *itertools.chain(*out)]).view(torch.uint8),
        [2 * sum(of_rank) for of_rank in lengths],
        [2 * sum(part.numel() for part in parts) for parts in out],
        group,
    )
    pieces = values.split([*itertools.chain(*lengths)])
    for (i, place), piece in zip(itertools.chain(*received), pieces, strict=True):
        held[i][place] = piece.view(matrices[i].shape(place))
