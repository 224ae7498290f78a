"""Count the collectives of this rank and their bytes, whichever library issues them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxtrain.profiling.watching import sent


@attrs.frozen
class Collective:
    """One collective as this rank takes part in it.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather,
            scatter, send, recv or barrier.
        bytes: Bytes of this rank's input tensors. For a `recv` and for receivers of a
            broadcast, bytes received. For a scatter, counted only on its source.
        operator: torch's name of the operator, such as `c10d::allreduce_`.
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
        """Number of collectives by kind; kinds that did not occur are absent."""
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
    """Count the collectives that this rank takes part in, and their bytes, by kind.

    Counts everything that reaches torch's operators: calls of `torch.distributed`, those of
    DDP's reducer in C++ during backward, of FSDP2 and DTensor, functional collectives, and those
    of compiled code. A coalesced collective of several tensors counts once; an object collective
    of torch counts twice, for the sizes and the objects.

    Only covers the caller's thread and autograd's. This excludes collectives that a
    communication hook starts when an earlier one ends (the last two of PowerSGD's three), and
    those of other threads. Copies through symmetric memory are not collectives.

    Yields:
        The counts so far; read them in the block or after it.

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
    """Runs every operator and records those that are collectives."""

    supports_higher_order_operators = True

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile falls back to eager in the block

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # DTensors are unwrapped first; operators on their local tensors are dispatched here later.
        if any(map(wraps_tensors, types)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if hasattr(func, "overloadpacket"):
            operator = func.name().partition(".")[0]
            calls = (Collective(*call, operator) for call in sent(operator, args))
            self._traffic.calls.extend(calls)
        return result


def wraps_tensors(kind: type) -> bool:
    """Whether tensors of a class pass operators to tensors that they wrap, as DTensor does."""
    base: Any = torch.Tensor
    plain = kind.__torch_dispatch__ is base.__torch_dispatch__
    return not plain and not issubclass(kind, FakeTensor)
