"""What this rank says to the others: collectives and their bytes, whoever issues them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxtrain.profile.dispatched_traffic import sent

__all__ = ["Collective", "Traffic", "count_collectives", "wraps_tensors"]


@attrs.frozen
class Collective:
    """One collective as this rank takes part in it.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather,
            scatter, send, recv or barrier.
        bytes: Of the tensors that this rank gives; of a `recv` and of those who receive a
            broadcast, of what arrives. A scatter takes bytes from its source only.
        operator: Torch's name of it, as `c10d::allreduce_`.
    """

    kind: str
    bytes: int
    operator: str


@attrs.frozen
class Traffic:
    """The collectives of this rank so far, in order.

    Attributes:
        calls: One entry per collective; the list grows while the block runs.
    """

    calls: list[Collective] = attrs.field(factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Collectives by kind; kinds that did not occur are absent."""
        return dict(Counter(call.kind for call in self.calls))

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes by kind; kinds that did not occur are absent."""
        totals: Counter[str] = Counter()
        for call in self.calls:
            totals[call.kind] += call.bytes
        return dict(totals)


@contextmanager
def count_collectives() -> Iterator[Traffic]:
    """Count the collectives that this rank takes part in, with their bytes, by kind.

    Counted is what reaches torch's operators: calls of `torch.distributed`, also those that
    DDP's reducer makes in C++ during backward, FSDP2's and DTensor's, functional ones, and
    those of compiled code. A coalesced collective of several tensors is one. Each object
    collective of torch is two, the sizes and the objects.

    Not seen are other threads than the caller's and autograd's: what a communication hook
    starts when an earlier collective ends (the last two of PowerSGD's three), and threads of
    one's own. Nor are copies through symmetric memory, which are no collectives.

    Yields:
        What was counted so far; read it in the block or after it.

    Example:
        >>> import torch
        >>> from fxtrain.testing import count_collectives, fake_world
        >>> with fake_world(8), count_collectives() as traffic:
        ...     torch.distributed.all_reduce(torch.ones(5))
        >>> traffic.counts, traffic.bytes
        ({'all_reduce': 1}, {'all_reduce': 20})
    """
    traffic = Traffic()
    with _Listener(traffic):
        yield traffic


class _Listener(TorchDispatchMode):
    """Passes every operator on and writes down those that are collectives."""

    supports_higher_order_operators = True

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or else torch.compile would fall back to eager code in the block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # A DTensor and its like first; the operators on what it wraps come here again.
        if any(map(wraps_tensors, types)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):
            operator = func._schema.name
            calls = (Collective(*call, operator) for call in sent(operator, args))
            self._traffic.calls.extend(calls)
        return result


def wraps_tensors(kind: type) -> bool:
    """Whether tensors of a class hand operators on to tensors that they wrap, as DTensor does."""
    plain = kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl  # pyright: ignore
    return not plain and not issubclass(kind, FakeTensor)
