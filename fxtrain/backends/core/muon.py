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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.optim import _muon

from fxtrain.errors import PlanError
from fxtrain.ops.whole_tensors import local_values

Place = tuple[int, ...]  # the index of a rank in each of several groups


@attrs.frozen(eq=False)
class _Matrix:
    """A parameter, and the ranks that share the work on it.

    Attributes:
        parameter: As the strategy holds it.
        groups: Process groups of this rank, one for each dimension of a mesh.
        is_sharded: Of each group, whether its ranks hold shards; otherwise they hold replicas.
        shards: The rows and columns of each shard, by the place of the ranks that hold it.
    """

    parameter: Tensor
    groups: tuple[Any, ...]
    is_sharded: tuple[bool, ...]
    shards: Mapping[Place, tuple[slice, slice]]

    def place(self, rank: Place) -> Place:
        """The key in `shards` of a rank: its index is 0 in groups of replicas."""
        return tuple(i if s else 0 for i, s in zip(rank, self.is_sharded, strict=True))

    def reached(self, rank: Place, dim: int, to: int) -> list[Place]:
        """The shards that a rank passes on to rank `to` of its group `dim`, in a fixed order.

        They are those of the ranks that are reached from there through the groups before `dim`.
        """
        fixed = self.place((*rank[:dim], to, *rank[dim + 1 :]))[dim:]
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
                parts = [self._momentum(matrix.parameter, group) for matrix in matrices]
                updates = _orthogonalized(matrices, parts, group)
                for matrix, update in zip(matrices, updates, strict=True):
                    self._change(matrix.parameter, update, group)
        return loss

    def _momentum(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """This rank's part of the momentum that is orthogonalized, in bf16."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        grad, buffer = local_values(gradient), local_values(state["momentum_buffer"])
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        # On the device of the groups, where shards are offloaded to the host.
        kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else None
        return update.to(kind or update.device, torch.bfloat16, copy=True)

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
def matrices_named(named: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Around a factory: a PlanError that names the parameters that Muon does not take."""
    try:
        yield
    except ValueError as error:
        if "Muon only supports 2D" not in str(error):
            raise
        others = [name for name, parameter in named if parameter.ndim != 2]
        raise PlanError(
            f"wrap(optimizer=...): torch's Muon updates matrices, and {len(others)} parameters "
            f"are not matrices: {', '.join(others[:5])}{', ...' if len(others) > 5 else ''}. Give "
            f"these to a second optimizer, with embeddings and the output layer: "
            f"[torch.optim.Muon(matrices), torch.optim.AdamW(others)]."
        ) from error


def _placed(parameter: Tensor, replicas: Any) -> _Matrix:
    """Which ranks share the work on a parameter, and where its shards are."""
    if not isinstance(parameter, DTensor):
        everything = (slice(0, parameter.shape[0]), slice(0, parameter.shape[1]))
        groups = () if replicas is None else (replicas,)
        return _Matrix(parameter, groups, (False,) * len(groups), {(0,) * len(groups): everything})
    mesh = parameter.device_mesh
    is_sharded = tuple(not placement.is_replicate() for placement in parameter.placements)
    groups = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    shards = _shards(parameter.shape, tuple(mesh.shape), parameter.placements)
    return _Matrix(parameter, groups, is_sharded, shards)


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


def _orthogonalized(
    matrices: Sequence[_Matrix], parts: Sequence[Tensor], options: Mapping[str, Any]
) -> list[Tensor]:
    """This rank's parts of orthogonalized matrices.

    Args:
        matrices: All of the same groups.
        parts: This rank's part of each.
    """
    groups = matrices[0].groups
    here = tuple(group.rank() for group in groups)
    owners = _owners(matrices, tuple(group.size() for group in groups))
    held = [{m.place(here): part} for m, part in zip(matrices, parts, strict=True)]
    for dim in range(len(groups)):
        _move(matrices, owners, held, here, dim, back=False)
    for matrix, owner, shards in zip(matrices, owners, held, strict=True):
        if owner == here:
            whole = _assembled(matrix, shards)
            update = _muon._zeropower_via_newtonschulz(
                whole, options["ns_coefficients"], options["ns_steps"], options["eps"]
            )
            shards.update((place, update[at]) for place, at in matrix.shards.items())
    for dim in reversed(range(len(groups))):
        _move(matrices, owners, held, here, dim, back=True)
    return [shards[m.place(here)] for m, shards in zip(matrices, held, strict=True)]


def _owners(matrices: Sequence[_Matrix], sizes: tuple[int, ...]) -> list[Place]:
    """For each matrix, the rank that computes it: the one with the least work so far."""
    # Multiplications of one iteration, up to a constant.
    work = [min(m.parameter.shape) ** 2 * max(m.parameter.shape) for m in matrices]
    load = dict.fromkeys(itertools.product(*map(range, sizes)), 0)
    owners: dict[int, Place] = {}
    for index in sorted(range(len(matrices)), key=lambda index: -work[index]):
        owners[index] = min(load, key=lambda place: load[place])
        load[owners[index]] += work[index]
    return [owners[index] for index in range(len(matrices))]


def _assembled(matrix: _Matrix, shards: Mapping[Place, Tensor]) -> Tensor:
    first = next(iter(shards.values()))
    if len(shards) == 1:  # replicas
        return first
    whole = torch.empty(matrix.parameter.shape, dtype=first.dtype, device=first.device)
    for place, part in shards.items():
        whole[matrix.shards[place]] = part
    return whole


def _move(
    matrices: Sequence[_Matrix],
    owners: Sequence[Place],
    held: list[dict[Place, Tensor]],
    here: Place,
    dim: int,
    *,
    back: bool,
) -> None:
    """Send shards to the ranks of a group through which their owners are reached, or back."""
    group = matrices[0].groups[dim]
    ranks = range(group.size())
    passing = [
        i
        for i, matrix in enumerate(matrices)
        if owners[i][:dim] == here[:dim] and (back or matrix.is_sharded[dim])
    ]
    if not passing:
        return

    def shards(owner: int, rank: int) -> list[tuple[int, Place]]:
        """Those of a rank of the group, of the matrices whose owner another one reaches."""
        mine = [i for i in passing if owners[i][dim] == owner]
        return [(i, place) for i in mine for place in matrices[i].reached(here, dim, rank)]

    me = here[dim]
    given = [shards(owner, me) for owner in ranks]
    taken = [shards(me, rank) for rank in ranks]
    sent, received = (taken, given) if back else (given, taken)
    parts = [[held[i][place] for i, place in keys] for keys in sent]
    _exchange(matrices, parts, received, held, group)


def _exchange(
    matrices: Sequence[_Matrix],
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[tuple[int, Place]]],
    held: list[dict[Place, Tensor]],
    group: Any,
) -> None:
    """Send tensors to each rank of a group, and put those that arrive into `held`.

    Args:
        received: From each rank, the matrix and the place of each shard, in its order.
    """
    me, like = group.rank(), next(part for parts in held for part in parts.values())
    arrived = list(zip(received[me], sent[me], strict=True))
    others = [[] if rank == me else list(keys) for rank, keys in enumerate(received)]
    out = [[] if rank == me else list(parts) for rank, parts in enumerate(sent)]
    shapes = {
        (i, place): tuple(at.stop - at.start for at in matrices[i].shards[place])
        for keys in others
        for i, place in keys
    }
    flat = [part.reshape(-1) for parts in out for part in parts]
    counts = [sum(math.prod(shapes[key]) for key in keys) for keys in others]
    values = like.new_empty(sum(counts))
    # As bytes, since gloo has no bf16.
    width = values.element_size()
    dist.all_to_all_single(
        values.view(torch.uint8),
        (torch.cat(flat) if flat else values[:0]).view(torch.uint8),
        [width * count for count in counts],
        [width * sum(part.numel() for part in parts) for parts in out],
        group,
    )
    keys = [key for of_rank in others for key in of_rank]
    pieces = values.split([math.prod(shapes[key]) for key in keys])
    arrived += [(key, p.view(shapes[key])) for key, p in zip(keys, pieces, strict=True)]
    for (i, _), _ in arrived:
        held[i] = {}
    for (i, place), part in arrived:
        held[i][place] = part
