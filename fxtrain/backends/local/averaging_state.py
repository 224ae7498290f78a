"""The state of independent replicas in a checkpoint, and how other replicas restore it."""

import torch
from torch import Tensor

from fxtrain.backends.local.averaging import MIN_WEIGHT, averaging_weight
from fxtrain.state import Round, StateReader


def round_state(now: Round) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State that is equal on all replicas, and each replica's own."""
    shared = {f"round.anchor.{name}": value for name, value in now.anchor.items()}
    shared |= {f"round.momentum.{name}": value for name, value in now.momentum.items()}
    return shared, _accounts(now)


def _accounts(now: Round) -> dict[str, Tensor]:
    return {
        "round.rows": now.rows,
        "round.weight": now.weight,
        "round.open_rows": now.open_rows,
        "round.open_weight": now.open_weight,
    }


def resumes_same_replicas(now: Round | None, saved: StateReader) -> bool:
    """Whether the saved replicas are these very replicas, each on its ranks."""
    return (
        now is not None
        and saved.ranks == saved.loading_ranks
        and saved.values.get("copy") == len(now.peers)
    )


def load_round(now: Round, saved: StateReader) -> None:
    """Restore a round, or start one from the current parameters if none was saved.

    At another world size, the progress of the round so far is in the mean of the parameters, and
    the replicas are weighted by what they train on from here on.
    """
    for name, value in now.anchor.items():
        if f"round.anchor.{name}" in saved.shapes:
            saved.fill(f"round.anchor.{name}", value)
            saved.fill(f"round.momentum.{name}", now.momentum[name])
        else:
            value.copy_(now.parameters[name].detach())
            now.momentum[name].zero_()
    same = resumes_same_replicas(now, saved)
    for name, account in _accounts(now).items():
        found = saved.own(name, saved.rank) if same else None
        account.copy_(torch.zeros_like(account) if found is None else found)


def weighted_mean(saved: StateReader, name: str) -> Tensor | None:
    """The mean of a tensor over the saved replicas, as the end of their round would compute it.

    None if all had the same value.
    """
    size = saved.values.get("copy")
    if size is None or saved.own(name, 0) is None:
        return None
    total, weights = 0.0, 0.0
    for first in range(0, saved.ranks, size):
        share = _saved_weight(saved, range(first, first + size))
        # If a replica has several ranks, each has its part along the first dimension.
        found = [saved.own(name, rank) for rank in range(first, first + size)]
        parts = [one for one in found if one is not None]
        whole = parts[0] if size == 1 else torch.cat(parts)
        total = total + share * whole.to(torch.promote_types(whole.dtype, torch.float32))
        weights += share
    assert isinstance(total, Tensor)
    return total / weights


def _saved_weight(saved: StateReader, ranks: range) -> float:
    """The weight of a replica that was saved by some ranks."""
    rows = saved.own("round.rows", ranks[0])
    weights = [saved.own("round.weight", rank) for rank in ranks]
    assert rows is not None  # every rank of such a checkpoint has saved them
    weight = torch.stack([one for one in weights if one is not None]).sum()
    return float(averaging_weight(rows, weight, saved.ranks // len(ranks))) + MIN_WEIGHT
