"""Replicas that train independently: a strategy around another one, and the average of a round.

Each replica is weighted by the rows, or the weight of its losses, that it trained on in the round,
so that a round of one update of plain SGD equals one update on all rows.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain import ops
from fxtrain.backends.core.device_mesh import second_group
from fxtrain.backends.core.optimizer_state import values_as_bytes, values_from_bytes
from fxtrain.backends.core.step_functions import broadcast_tensors
from fxtrain.backends.core.weights import from_first_rank
from fxtrain.backends.local_sgd.rounds import (
    BUFFERS,
    MIN_WEIGHT,
    PendingMean,
    apply_means,
    buffers_of,
    first_round,
    load_outer_state,
    outer_state,
    pack_fragment,
    send,
)
from fxtrain.errors import StepError
from fxtrain.ops.transport.exchange import rank_loss_guard
from fxtrain.ops.whole_tensors import local_values, plain_name
from fxtrain.state import (
    Batch,
    Comm,
    DiLoCo,
    DistContext,
    Key,
    LocalSGD,
    Mesh,
    MicroBatch,
    ModelState,
    Plan,
    Position,
    Round,
    StateReader,
    Strategy,
    TensorIndex,
    Weight,
    WeightedLoss,
    Wrapped,
)
from fxtrain.state.keys import GRADIENTS, OPTIMIZER, ROUND
from fxtrain.state.strategy_configs import fragments_due

_WEIGHTED = 2  # the index of weighted micro-batches in `Round.rows`
_RANKS_OF_REPLICA = "copy"  # among the values of a checkpoint
_FRAGMENTS = "fragments"  # names of their parameters
_ROWS, _WEIGHT, _DUE = Key(ROUND, "rows"), Key(ROUND, "weight"), Key(ROUND, "due")
_SENT = "sent"  # in keys: what a replica has sent of a fragment, by the number of its collective


def local_problems(strategy: Strategy, ctx: DistContext, plan: Plan) -> tuple[str, ...]:
    """Why replicas cannot train independently under a plan, whatever the strategy's settings."""
    if plan.local is None or ctx.world_size == 1:
        return ()
    name = type(plan.local).__name__
    if strategy.average is None:
        return (
            f"Plan(local={name}(...)) trains replicas independently, but {strategy.name} does not "
            f"support that. Use DDP(), or FSDP(shard=...).",
        )
    return tuple(
        f"Plan(local={name}(...)) averages over the data axis, but the mesh has {axis}={n}. "
        f"Omit that axis from fx.Mesh(...)."
        for axis, n in ctx.mesh.sizes.items()
        if n > 1 and axis not in ("replicate", "shard")
    )


def independent_replicas(model: Wrapped, size: int = 1) -> Wrapped:
    """The model with replicas that train independently, where its plan says so.

    Its strategy runs unchanged, inside functions that narrow each update to one replica.

    Args:
        model: Wrapped in its final form.
        size: Ranks of a replica: those of the mesh's shard axis, or one.
    """
    if model.plan.local is None or model.ctx.axis("data").world_size == size:
        return model
    inner, data = model.strategy, model.ctx.axis("data")
    strategy = attrs.evolve(
        inner,
        run=functools.partial(_run, inner),
        state=functools.partial(_state, inner),
        load_state=functools.partial(_load_state, inner),
        weights=functools.partial(_weights, inner),
    )
    copies = data if size == 1 else model.ctx.axis("replicate")
    within = only_this_rank(data) if size == 1 else model.ctx.axis("shard")
    first = data.rank // size * size
    peers = tuple(range(first, first + size))
    model.status.replica = first_round(model.module, model.plan.local, copies, within, peers)
    return attrs.evolve(model, strategy=strategy)


def only_this_rank(ctx: DistContext) -> DistContext:
    """A context of one rank, on the same device."""
    return attrs.evolve(ctx, rank=0, world_size=1, comm=Comm(), mesh=Mesh(replicate=1))


def _run(
    inner: Strategy,
    model: Wrapped,
    micro_batch: MicroBatch,
    compute_loss: Callable[[Wrapped, Batch], WeightedLoss],
) -> WeightedLoss:
    """One micro-batch, and what the replica trained on in it."""
    weighted, now = inner.run(model, micro_batch, compute_loss), _round(model)
    batch = micro_batch.batch
    if weighted.explicit:
        weight = weighted.weight
        if not isinstance(weight, Tensor):
            weight = torch.tensor(weight, device="cpu")
        now.open_weight.add_(weight.detach().reshape(()))
        now.open_rows[_WEIGHTED] += 1
    else:
        now.open_rows[:2] += torch.tensor([sum(now.sizes(batch)), sum(batch.sizes)], device="cpu")
    return weighted


def _round(model: Wrapped) -> Round:
    assert model.status.replica is not None
    return model.status.replica


def _state(inner: Strategy, model: Wrapped) -> ModelState:
    """Every tensor and every optimizer differs between replicas."""
    state, now = inner.state(model), _round(model)
    optimizers = {
        Key.of(OPTIMIZER, index, "state"): values_as_bytes(values["state"], index)
        for index, values in enumerate(state.values["optimizers"])
    }
    return attrs.evolve(
        state,
        tensors={**state.tensors, **outer_state(now)},
        own={**state.own, **optimizers, **_accounts(now), **_under_way(now)},
        values={
            **state.values,
            _RANKS_OF_REPLICA: len(now.peers),
            _FRAGMENTS: [list(names) for names in now.fragments],
        },
        varies_by_rank=frozenset(state.tensors),
    )


def _load_state(inner: Strategy, model: Wrapped, saved: StateReader) -> None:
    """Each replica as it was, if it has the same ranks; otherwise their mean."""
    now = _round(model)
    names = [list(names) for names in now.fragments]
    resumes = (
        saved.ranks == saved.loading_ranks
        and saved.values.get(_RANKS_OF_REPLICA) == len(now.peers)
        and saved.values.get(_FRAGMENTS, names if len(names) == 1 else None) == names
    )
    inner.load_state(model, _of_this_replica(saved) if resumes else saved)
    _load_round(model, now, saved, resumes=resumes)


def _of_this_replica(saved: StateReader) -> StateReader:
    """The saved state as this rank saved it, to be read like one in which ranks are equal."""

    def fill(key: Key, tensor: Any) -> None:
        saved.fill(key, tensor)
        if key.kind == GRADIENTS:
            return  # the mean; `load_window` reads what is this rank's own
        if (own := saved.own(key, saved.rank)) is not None:
            local_values(tensor).copy_(own)

    def own_of(key: Key, rank: int) -> Tensor | None:
        return None if key in states else saved.own(key, rank)

    states: dict[Key, Any] = {}
    optimizers: list[Any] = []
    for index, optimizer in enumerate(saved.values["optimizers"]):
        key = Key.of(OPTIMIZER, index, "state")
        if (raw := saved.own(key, saved.rank)) is not None:
            states[key] = values_from_bytes(raw)
        optimizers.append({**optimizer, "state": states.get(key, optimizer["state"])})
    values = {**saved.values, "optimizers": optimizers, _RANKS_OF_REPLICA: None}
    return attrs.evolve(saved, fill=fill, own=own_of, values=values)


def _weights(inner: Strategy, model: Wrapped) -> dict[str, Weight]:
    """The first replica's; what is filled in begins a new round of an outer optimizer."""
    weights, now = inner.weights(model), _round(model)
    for name, weight in weights.items():
        if isinstance(weight.like, nn.Parameter):
            weights[name] = from_first_rank(weight, now.copies)
    for name, anchor in now.anchor.items():
        if name in weights:
            fill = functools.partial(_fill_both, weights[name], anchor, now)
            weights[name] = attrs.evolve(weights[name], fill=fill)
    return weights


@torch.no_grad()
def _fill_both(
    weight: Weight, anchor: Tensor, now: Round, read: Callable[[TensorIndex | None], Tensor]
) -> None:
    now.under_way.clear()  # what the replicas have sent was a change of other values
    weight.fill(read)
    anchor.copy_(weight.like)


@torch.no_grad()
def average_replicas(model: Wrapped, position: Position | None) -> None:
    """End a round, if it ends here: every replica gets the mean, or the outer optimizer's result.

    Floating-point buffers are averaged as well; of others, the first replica's values are used.

    Effects:
        One all-reduce of all parameters (two, if only some are float64), one of floating-point
        buffers, and one broadcast per dtype of all other buffers, if there are any.
    """
    now, local = _round(model), model.plan.local
    assert local is not None
    if position is not None and position.micro == 0:
        # A window still open where the data ends belongs to the round of its update.
        now.rows.add_(now.open_rows)
        now.weight.add_(now.open_weight)
        now.open_rows.zero_()
        now.open_weight.zero_()
    everything = position is None or position.is_last
    update = 0 if position is None else position.updates
    due = [n for n, exchange in now.under_way.items() if everything or exchange.due <= update]
    for fragment in due:
        _finish(model, now, local, fragment)
    if everything:
        begin = [n for n in range(len(now.fragments)) if n not in due]
    else:
        assert position is not None
        begin = fragments_due(local, position)
    delay = local.delay if isinstance(local, DiLoCo) and not everything else 0
    if begin:
        check_parameters(model, now)
    if len(now.fragments) - 1 in begin:
        _average_buffers(model, now, local, update)
    for fragment in begin:
        _start(model, now, local, fragment, update + delay, at_once=not delay)
    if not delay:
        for fragment in begin:
            _finish(model, now, local, fragment)


def _average_buffers(model: Wrapped, now: Round, local: LocalSGD | DiLoCo, update: int) -> None:
    if buffers_of(model.module, floating=True):
        _start(model, now, local, BUFFERS, update, at_once=True)
        _finish(model, now, local, BUFFERS)
    with rank_loss_guard(now.copies, ("average", "buffers of whole numbers")):
        broadcast_tensors(buffers_of(model.module, floating=False), now.copies)


def check_parameters(model: Wrapped, now: Round) -> None:
    """Refuse parameters that require a gradient only since the model was wrapped."""
    named = ((plain_name(name), p) for name, p in model.module.named_parameters())
    later = [name for name, p in named if p.requires_grad and name not in now.parameters]
    if later:
        raise StepError(
            f"Plan(local=...) averages the parameters that required a gradient in fx.wrap, and "
            f"{', '.join(later[:5])} require one only now, so each replica would train them alone. "
            f"Call requires_grad_() before fx.wrap, or fx.unwrap the model and wrap it again.",
            code="FX505",
        )


def _averaging_weight(rows: Tensor, weight: Tensor, copies: int) -> Tensor | float:
    """The weight of a replica: 1 if all trained on equally many rows."""
    local_rows, every, weighted = rows.tolist()
    if weighted:
        return weight + local_rows
    return local_rows * copies / every if every else 1.0


def _start(
    model: Wrapped,
    now: Round,
    local: LocalSGD | DiLoCo,
    key: int,
    due: int,
    *,
    at_once: bool,
) -> None:
    """Send what this replica has made of a fragment or of buffers since they were averaged last."""
    weight = now.weight[key]
    if now.rows[key, _WEIGHTED]:
        weight = ops.reduce(weight, now.within, op="sum")
    weight = _averaging_weight(now.rows[key], weight, now.copies.world_size) + MIN_WEIGHT
    packed = pack_fragment(model.module, now, local, key, weight, due)
    keep = not at_once or bool(now.residual)
    group = now.copies.comm.group if at_once else _delayed_group(model, now)
    now.under_way[key] = send(packed, group, now.copies.world_size, keep=keep)


def _delayed_group(model: Wrapped, now: Round) -> Any:
    """The process group of what is under way while other collectives of the replicas run."""
    axes = ("replicate", "shard") if len(now.peers) == 1 else ("replicate",)
    return second_group(model.ctx, now.copies, axes)


def _finish(model: Wrapped, now: Round, local: LocalSGD | DiLoCo, key: int) -> None:
    """Wait for a mean, and give every replica what follows from it.

    Raises:
        CollectiveError: a replica never sent its part.
    """
    exchange = now.under_way.pop(key)
    for received, work in zip(exchange.received, exchange.works, strict=True):
        call = ("average", f"{received.numel()} numbers of {received.dtype}")
        with rank_loss_guard(now.copies, call):
            work.wait()
    apply_means(model.module, now, local, key, exchange)


def _accounts(now: Round) -> dict[Key, Tensor]:
    return {
        _ROWS: now.rows,
        _WEIGHT: now.weight,
        Key(ROUND, "open_rows"): now.open_rows,
        Key(ROUND, "open_weight"): now.open_weight,
        **{Key.of(ROUND, "residual", name): value for name, value in now.residual.items()},
    }


def _load_round(model: Wrapped, now: Round, saved: StateReader, *, resumes: bool) -> None:
    """Restore a round, or start one from the current parameters if none was saved.

    Where other replicas resume, the progress of the round so far is in the mean of the parameters,
    and they are weighted by what they train on from here on.
    """
    load_outer_state(now, saved)
    for key, account in _accounts(now).items():
        own = saved.own(key, saved.rank) if resumes else None
        account.copy_(torch.zeros_like(account) if own is None else own)
    now.under_way.clear()
    if resumes:
        _resume_exchanges(model, now, saved)


def _under_way(now: Round) -> dict[Key, Tensor]:
    """What a checkpoint has of the exchanges that are under way."""
    tensors = {
        Key.of(ROUND, _SENT, fragment, number): flat
        for fragment, exchange in now.under_way.items()
        for number, flat in enumerate(exchange.sent)
    }
    due = [[fragment, exchange.due] for fragment, exchange in now.under_way.items()]
    if due:
        tensors[_DUE] = torch.tensor(due, device="cpu")
    return tensors


def _resume_exchanges(model: Wrapped, now: Round, saved: StateReader) -> None:
    due = saved.own(_DUE, saved.rank)
    for fragment, update in [] if due is None else due.tolist():
        sent: list[Tensor] = []
        for number in itertools.count():
            flat = saved.own(Key.of(ROUND, _SENT, fragment, number), saved.rank)
            if flat is None:
                break
            sent.append(flat.to(now.copies.device))
        group = _delayed_group(model, now)
        exchange = PendingMean(due=update, sent=sent)
        now.under_way[fragment] = send(exchange, group, now.copies.world_size, keep=True)


def weighted_mean(saved: StateReader, key: Key) -> Tensor | None:
    """The mean of a weight over the saved replicas, as the end of their round would compute it.

    None if all had the same value.
    """
    size = saved.values.get(_RANKS_OF_REPLICA)
    if size is None or saved.own(key, 0) is None:
        return None
    fragments = saved.values.get(_FRAGMENTS, [])
    fragment = next((n for n, names in enumerate(fragments) if key.name in names), 0)
    total, weights = 0.0, 0.0
    for first in range(0, saved.ranks, size):
        share = _saved_weight(saved, range(first, first + size), fragment)
        # If a replica has several ranks, each has its part along the first dimension.
        shards = [saved.own(key, rank) for rank in range(first, first + size)]
        parts = [shard for shard in shards if shard is not None]
        whole = parts[0] if size == 1 else torch.cat(parts)
        total = total + share * whole.to(torch.promote_types(whole.dtype, torch.float32))
        weights += share
    assert isinstance(total, Tensor)
    return total / weights


def _saved_weight(saved: StateReader, ranks: range, fragment: int) -> float:
    """The weight of a replica that was saved by some ranks, for a fragment."""
    rows = saved.own(_ROWS, ranks[0])
    weights = [saved.own(_WEIGHT, rank) for rank in ranks]
    assert rows is not None  # every rank of such a checkpoint has saved them
    weight = torch.stack(
        [tensor.reshape(-1)[fragment] for tensor in weights if tensor is not None]
    ).sum()
    rows = rows.view(-1, 3)[fragment]
    return float(_averaging_weight(rows, weight, saved.ranks // len(ranks))) + MIN_WEIGHT
