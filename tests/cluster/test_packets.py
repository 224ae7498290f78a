"""How packets travel: in which order, within which time, and what an interrupt leaves."""

import signal
import time

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain import ops
from fxtrain.ops.transport.packets import packets_of, send, wait_packets
from fxtrain.state import Comm


@attrs.define(slots=False)
class _Work:
    log: list
    name: str
    seconds: float = 0.0

    def wait(self, timeout):
        self.log.append(f"wait {self.name}")
        self.log.append(timeout.total_seconds())
        time.sleep(self.seconds)


@attrs.define
class _Group:
    """Writes down what is asked of a group; ranks in `gone` have left."""

    log: list = attrs.field(factory=list)
    gone: set = attrs.field(factory=set)
    seconds: float = 0.0

    def recv(self, tensors, rank, tag):
        if rank in self.gone:
            raise RuntimeError(f"Connection closed by peer {rank}")
        self.log.append(f"recv {rank}")
        return _Work(self.log, f"recv {rank}", self.seconds)

    def send(self, tensors, rank, tag):
        self.log.append(f"send {rank}")
        return _Work(self.log, f"send {rank}")


def _exchange(rank, ranks, *, at_once=False, **options):
    """The group, how far it was when packets were sent, and the waits that were allowed."""
    group = _Group(**options)
    comm = Comm(control=group, ranks=tuple(range(ranks)), timeout_s=7.0)
    packets = packets_of(comm, rank)
    group.log.clear()
    send(comm, packets, at_once=at_once)
    told = list(group.log)
    group.log.clear()
    wait_packets(comm, packets)
    calls = [entry for entry in group.log if isinstance(entry, str)]
    return told, calls, [entry for entry in group.log if isinstance(entry, float)]


def test_of_two_ranks_the_higher_speaks_first():
    told, calls, _ = _exchange(1, 2)
    assert told == ["send 0"]
    assert calls == ["wait recv 0", "recv 0", "wait send 0"]
    told, calls, _ = _exchange(0, 2)
    assert told == []
    # Ready for the next packet before the other may send it.
    assert calls == ["wait recv 1", "recv 1", "send 1", "wait send 1"]


def test_a_rank_between_others_waits_for_nobody_who_waits_for_it():
    told, calls, _ = _exchange(1, 4)
    assert told == ["send 0"]
    answers = ["wait recv 2", "wait recv 3", "recv 2", "recv 3", "send 2", "send 3"]
    assert calls[:6] == answers and calls[6:8] == ["wait recv 0", "recv 0"]


def test_packets_that_are_waited_for_later_are_sent_at_once():
    assert _exchange(0, 3, at_once=True)[0] == ["send 1", "send 2"]


def test_all_ranks_together_have_the_time_of_one_call():
    waits = _exchange(0, 4, seconds=0.05)[2]
    assert waits[0] <= 7.0 and waits[1] <= waits[0] - 0.05 and waits[2] <= waits[1] - 0.05


def test_a_rank_that_left_matters_once_more_is_expected_of_it():
    group = _Group()
    comm = Comm(control=group, ranks=(0, 1))
    packets = packets_of(comm, 0)
    group.gone.add(1)
    send(comm, packets)
    wait_packets(comm, packets)  # it left when it had sent this
    send(comm, packets)
    with pytest.raises(RuntimeError, match="closed by peer 1"):
        wait_packets(comm, packets)


class _Gathering(_Group):
    """Fills the packets only once its all-gather is awaited."""

    def _allgather_base(self, packets, mine):
        def fill(_):
            packets.view(9, -1)[:] = mine

        work = _Work(self.log, "all-gather")
        work.wait = fill
        return work


def test_many_ranks_read_packets_once_they_are_gathered():
    comm = Comm(control=_Gathering(), ranks=tuple(range(9)), timeout_s=7.0)
    packets = packets_of(comm, 3)
    packets.buffer[3, :32] = torch.arange(32, dtype=torch.uint8)
    send(comm, packets)
    assert wait_packets(comm, packets).headers == [bytes(range(32))] * 9


class _Enough(Exception):
    pass


def _interrupted(ctx, who, n):
    def stop(*_):
        raise _Enough

    if ctx.rank == who:
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(_Enough):
            ops.gather(torch.ones(n), ctx)
        signal.signal(signal.SIGALRM, before)
    else:
        if ctx.rank == ctx.world_size - 1 or who == ctx.world_size - 1:
            time.sleep(0.4)
        ops.gather(torch.ones(n), ctx)
    return [ops.gather(torch.tensor(10.0 * i + ctx.rank), ctx).tolist() for i in (1, 2, 3)]


def _big(rank, n):
    return torch.arange(n, dtype=torch.float32) + rank


def _payloads(ctx, sizes):
    """Objects of which some do not fit in a packet, of another size on each rank."""
    found = ops.gather_objects(_big(ctx.rank, sizes[ctx.rank]), ctx)
    return [torch.equal(one, _big(rank, n)) for rank, (one, n) in enumerate(zip(found, sizes))]  # noqa: B905


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_does_not_fit_in_a_packet_follows_it(clusters, ranks):
    for sizes in ([1, 5000, 100_000, 3][:ranks], [300_000] * ranks, [2100, 1, 1, 1][:ranks]):
        assert clusters[ranks].run(_payloads, sizes) == [[True] * ranks] * ranks


CALLS = {
    "large": lambda ctx: ops.gather(_big(ctx.rank, 30_000), ctx),
    "larger": lambda ctx: ops.gather(_big(ctx.rank, 60_000), ctx),
    "small": lambda ctx: ops.gather(torch.tensor(1.0), ctx),
    "reduce": lambda ctx: ops.reduce(_big(ctx.rank, 30_000), ctx),
    "object": lambda ctx: ops.broadcast_object("x" * 100_000, ctx, src=ctx.world_size - 1),
    "barrier": ops.barrier,
}


def _different(ctx, names):
    for _ in range(2):  # the second time, calls of that kind are known
        with pytest.raises(fx.CollectiveError, match="gather") as caught:
            CALLS[names[ctx.rank]](ctx)
    rows = ops.gather(_big(ctx.rank, 30_000), ctx)
    expected = torch.cat([_big(rank, 30_000) for rank in range(ctx.world_size)])
    return torch.equal(rows, expected), str(caught.value)


@pytest.mark.parametrize("other", sorted(set(CALLS) - {"large"}))
def test_calls_that_differ_fail_on_all_ranks_whatever_follows_their_packets(clusters, other):
    for ranks in (2, 4):
        names = ["large", other, other, "large"][:ranks]
        found = clusters[ranks].run(_different, names)
        assert [right for right, _ in found] == [True] * ranks
        assert len({text for _, text in found}) == 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_after_one_that_was_interrupted_are_not_mixed_up_with_it(clusters, ranks):
    for who in range(ranks):
        for n in (1, 10_000) if who in (0, ranks - 1) else (10_000,):
            expected = [[10.0 * i + rank for rank in range(ranks)] for i in (1, 2, 3)]
            assert clusters[ranks].run(_interrupted, who, n) == [expected] * ranks
