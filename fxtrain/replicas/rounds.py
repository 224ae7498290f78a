"""Averages of replicas that train independently, over those that are there when one is due.

A replica that was lost meanwhile is missed only here, and one that joins is healed here. What is
sent of a fragment is kept until its mean is applied, so that it can be sent again to those that are
left, and everything under way is waited for before the group of replicas changes.
"""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

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
from fxtrain.backends.local_sgd.strategy import check_parameters, only_this_rank
from fxtrain.replicas.healing import Progress
from fxtrain.replicas.members import Members
from fxtrain.state import (
    DiLoCo,
    LocalSGD,
    ModelState,
    Position,
    Round,
    StateReader,
    Strategy,
    Wrapped,
    unstructure,
)
from fxtrain.state.strategy_configs import fragments_due

_DIGESTED = 1 << 16  # numbers of a mean


def independent(model: Wrapped, local: LocalSGD | DiLoCo, updates: int) -> tuple[Wrapped, "Rounds"]:
    """The model with an outer optimizer in its state, and the averages of a run of `updates`."""
    alone = only_this_rank(model.ctx.axis("data"))
    now = first_round(model.module, local, alone, alone, ())
    inner = model.strategy
    strategy = attrs.evolve(
        inner,
        state=functools.partial(_state, inner, now),
        load_state=functools.partial(_load_state, inner, now),
    )
    model = attrs.evolve(model, strategy=strategy)
    return model, Rounds(model=model, local=local, now=now, updates=updates)


def _state(inner: Strategy, now: Round, model: Wrapped) -> ModelState:
    state = inner.state(model)
    return attrs.evolve(state, tensors={**state.tensors, **outer_state(now)})


def _load_state(inner: Strategy, now: Round, model: Wrapped, saved: StateReader) -> None:
    """Begin with the saved outer state, or with the parameters of a run without one."""
    inner.load_state(model, saved)
    load_outer_state(now, saved)
    for residual in now.residual.values():
        residual.zero_()
    now.weight.zero_()
    now.under_way.clear()


@attrs.define(kw_only=True, eq=False)
class Rounds:
    """What this replica has trained since the last averages. It is mutable."""

    model: Wrapped
    local: LocalSGD | DiLoCo
    now: Round  # the outer parameters, the outer optimizer's state, and what is under way
    updates: int  # of the whole run
    rows: float = 0.0  # that this replica has trained on since replicas exchanged something last

    @property
    def config(self) -> dict[str, Any]:
        """How replicas are averaged, as JSON."""
        return unstructure(self.local)

    def under_way(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """For a replica that joins, what the others have received, or will send again."""
        tensors = {
            f"{key}.{number}": flat.cpu()
            for key, exchange in self.now.under_way.items()
            for number, flat in enumerate(exchange.received)
        }
        due = {str(key): exchange.due for key, exchange in self.now.under_way.items()}
        return tensors, {"local": self.config, "due": due}

    def enter(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Train from the outer parameters on, with no part in what is under way."""
        with torch.no_grad():
            for name, value in self.now.anchor.items():
                self.now.parameters[name].copy_(value)
        self.rows = 0.0
        device = self.now.copies.device
        for key, due in facts["due"].items():
            packed = self._pack(int(key), 0.0, due)
            names = [f"{key}.{number}" for number in range(len(packed.sent))]
            received = [tensors[name].to(device) for name in names if name in tensors]
            self.now.under_way[int(key)] = attrs.evolve(packed, received=received)

    def count(self, weight: float, rows: float) -> None:
        """Add what this replica has trained on in an update."""
        self.now.weight.add_(weight)
        self.rows += rows

    def ends_at(self, position: Position) -> bool:
        """Whether replicas exchange something after the update before a position."""
        due = any(exchange.due <= position.updates for exchange in self.now.under_way.values())
        return position.updates > 0 and (due or bool(self._begun(position)))

    def _ends(self, position: Position) -> bool:
        """Whether everything is averaged at a position."""
        return position.micro == 0 and (position.is_last or position.updates == self.updates)

    def _begun(self, position: Position) -> tuple[int, ...]:
        """The fragments whose average begins at a position."""
        if self._ends(position):
            return tuple(range(len(self.now.fragments)))
        return fragments_due(self.local, position)

    def end_traffic(self, members: Members) -> None:
        """Wait for what is under way: the group that it runs in may change at the next `gather`."""
        works = [work for exchange in self.now.under_way.values() for work in exchange.works]
        if not works:
            return
        members.exchange(lambda: [work.wait() for work in works])
        if members.commit():
            self._replace(works=[])
        else:
            self.forget()

    def forget(self) -> None:
        """Have everything that is under way sent again."""
        self._replace(works=[], received=[])

    def _replace(self, **changes: Any) -> None:
        for key, exchange in self.now.under_way.items():
            self.now.under_way[key] = attrs.evolve(exchange, **changes)

    def begin(self, position: Position) -> None:
        """Prepare what this replica sends at a position."""
        delay = self.local.delay if isinstance(self.local, DiLoCo) else 0
        due = position.updates + (0 if self._ends(position) else delay)
        begun = [key for key in self._begun(position) if key not in self.now.under_way]
        if begun:
            check_parameters(self.model, self.now)
        if len(self.now.fragments) - 1 in begun and buffers_of(self.model.module, floating=True):
            begun = [BUFFERS, *begun]
        for key in begun:
            weight = float(self.now.weight[key]) + MIN_WEIGHT
            at = position.updates if key == BUFFERS else due
            self.now.under_way[key] = self._pack(key, weight, at)

    @torch.no_grad()
    def _pack(self, key: int, weight: float, due: int) -> PendingMean:
        return pack_fragment(self.model.module, self.now, self.local, key, weight, due)

    def exchange(self, members: Members, progress: Progress) -> tuple[float, Tensor]:
        """Average what is due at a position over the replicas that are there, and start the rest.

        Returns rows that they have trained on since the last exchange, and whole-number buffers of
        the first one; undefined if a replica was lost meanwhile. One all-reduce of a few numbers,
        and those of each fragment that some replica lacks.
        """
        under_way = self.now.under_way
        keys = sorted(under_way)
        flags = [float(under_way[key].complete) for key in keys]
        facts = torch.tensor(
            [progress.history, self.rows, *flags], dtype=torch.float64, device="cpu"
        ).to(self.now.weight)
        whole = [buffer.reshape(-1) for buffer in buffers_of(self.model.module, floating=False)]
        empty = torch.empty(0, dtype=torch.int64, device=self.model.ctx.device)
        counters = torch.cat([empty, *(buffer.to(empty) for buffer in whole)])
        if members.index:  # added to those of the first replica
            counters.zero_()
        if not members.sum([sent for sent in (facts, counters) if len(sent)]):
            return 0.0, counters
        history, rows, *complete = facts.tolist()
        members.check_history(history, progress.history, progress.position.updates)

        def traffic() -> None:
            for key, count in zip(keys, complete, strict=True):
                if count < members.live:
                    under_way[key] = send(under_way[key], members.group, members.live, keep=True)
            for key in self._due(progress.position):
                for work in under_way[key].works:
                    work.wait()

        members.exchange(traffic)
        return rows, counters

    @torch.no_grad()
    def apply(self, position: Position, counters: Tensor) -> tuple[bool, int]:
        """Continue from what was averaged; returns whether parameters changed, and a digest."""
        due, digest = self._due(position), 0
        for key in due:
            exchange = self.now.under_way.pop(key)
            for flat in exchange.received:
                digest = zlib.crc32(flat.flatten()[:_DIGESTED].cpu().numpy().tobytes(), digest)
            apply_means(self.model.module, self.now, self.local, key, exchange)
        if len(self.now.fragments) - 1 in self._begun(position):
            whole = buffers_of(self.model.module, floating=False)
            parts = counters.split([buffer.numel() for buffer in whole])
            for buffer, part in zip(whole, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))
        self.rows = 0.0
        return bool(due), digest

    def _due(self, position: Position) -> list[int]:
        everything = self._ends(position)
        under_way = self.now.under_way.items()
        return sorted(
            key for key, exchange in under_way if everything or exchange.due <= position.updates
        )
