"""The pool of ranks itself: each call gets its own answers, however an earlier one failed."""

import contextlib
import os
import signal
import time
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from fxtrain.testing import Cluster, RankFailure


@pytest.fixture(scope="module")
def pool():
    ranks = Cluster(2, timeout_s=60.0, call_s=90.0)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def works_again(pool):
    """Whatever a test did to the pool, the next calls are answered by all ranks, in order."""
    yield
    for name in ("first", "second", "third"):
        assert pool.run(_echo, name) == [(name, 0, 2), (name, 1, 2)]


def _echo(ctx, name):
    return name, ctx.rank, int(ops.reduce(1, ctx, op="sum"))


class _TwoArguments(Exception):
    """Pickles, but is made anew from one argument, which its class does not take."""

    def __init__(self, name, reason):
        super().__init__(f"{name}: {reason}")


class _OnlyHere:
    """A value that unpickles in no other process."""

    def __reduce__(self):
        return _only_in, (os.getpid(),)


def _only_in(pid):
    if os.getpid() != pid:
        raise LookupError("made in another process")


def _raises(ctx):
    if ctx.rank == 0:
        raise _TwoArguments("layer", "is broken")
    return "fine"


def test_an_error_that_does_not_unpickle_is_a_rank_failure_with_its_traceback(pool):
    with pytest.raises(RankFailure, match=r"Rank 0 of 2: .*_TwoArguments: layer: is") as caught:
        pool.run(_raises)
    (trace,) = caught.value.__notes__
    assert "On rank 0 of 2" in trace and "in _raises" in trace and "test_pool.py" in trace


def _answers(ctx):
    return _OnlyHere() if ctx.rank == 0 else lambda: None


def test_answers_that_do_not_travel_are_rank_failures(pool):
    first, second = pool.outcomes(_answers)
    assert isinstance(first, RankFailure) and isinstance(second, RankFailure)
    assert "a _OnlyHere" in str(first) and "made in another process" in first.__notes__[0]
    assert "a function, does not pickle" in str(second) and "<lambda>" in second.__notes__[0]


def _ends(ctx):
    if ctx.rank == 0:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_die_are_named_with_how_they_ended(pool):
    first, second = pool.outcomes(_ends)
    assert isinstance(first, RankFailure) and isinstance(second, RankFailure)
    assert str(first) == "Rank 0 of 2: Its process ended with exit code 3."
    assert str(second) == "Rank 1 of 2: Its process ended by SIGKILL."


def _pid(ctx):
    return os.getpid()


@pytest.mark.slow
def test_a_worker_that_died_between_calls_is_the_cause_and_not_its_echo(pool):
    os.kill(pool.run(_pid)[1], signal.SIGKILL)
    with pytest.raises(RankFailure, match=r"Rank 1 of 2: .*SIGKILL") as caught:
        pool.run(_echo, "lost")
    (echo,) = caught.value.__notes__
    assert "on rank 0 of 2: " in echo and "CollectiveError" in echo


def _hangs(ctx):
    if ctx.rank == 1:
        time.sleep(600)
    raise OSError("disk full")


@pytest.mark.slow
def test_a_hang_is_killed_and_the_other_ranks_are_heard():
    with (
        contextlib.closing(Cluster(2, timeout_s=60.0, call_s=8.0)) as ranks,
        pytest.raises(OSError, match="disk full") as caught,
    ):
        ranks.run(_hangs)
    own, other = caught.value.__notes__
    assert "On rank 0 of 2" in own and "in _hangs" in own and "test_pool.py" in own
    assert "on rank 1 of 2: It did not answer within 8 s and was killed" in other


def _never_ends(ctx):
    time.sleep(600)


def test_a_hang_is_killed():
    killed = r"It did not answer within 0\.2 s and was killed"
    with (
        contextlib.closing(Cluster(1, call_s=0.2)) as alone,
        pytest.raises(RankFailure, match=killed),
    ):
        alone.run(_never_ends)


def _leaves(ctx):
    if ctx.rank == 1:
        raise SystemExit(4)
    raise KeyError("weight")


def test_a_rank_that_exits_does_not_end_the_tests(pool):
    with pytest.raises(RankFailure, match="Rank 1 of 2: SystemExit: 4") as caught:
        pool.run(_leaves)
    own, other = caught.value.__notes__
    assert "in _leaves" in own
    assert "on rank 0 of 2: KeyError: 'weight'" in other


def _gives_an_error(ctx):
    return ValueError(ctx.rank)


def test_an_error_that_is_returned_is_a_result(pool):
    assert [error.args for error in pool.run(_gives_an_error)] == [(0,), (1,)]


class _Interrupts:
    """Stops the parent in the middle of reading an answer, as Ctrl-C and a test's timeout do."""

    def __init__(self, pid):
        self.pid = pid

    def __reduce__(self):
        return _interrupt, (self.pid,)


def _interrupt(pid):
    if os.getpid() == pid:
        raise KeyboardInterrupt


def _interrupts(ctx, pid):
    return _Interrupts(pid)


def test_answers_of_an_interrupted_call_are_never_those_of_the_next(pool):
    with pytest.raises(KeyboardInterrupt):
        pool.run(_interrupts, os.getpid())


def test_arguments_that_do_not_unpickle_on_a_rank_are_an_error_of_this_call(pool):
    with pytest.raises(LookupError, match="made in another process"):
        pool.run(_echo, _OnlyHere())


def test_a_function_that_does_not_pickle_is_refused_before_it_is_sent(pool):
    with pytest.raises(TypeError, match="module level"):
        pool.run(lambda ctx: ctx.rank)


def _reads_with_workers(ctx):
    loader = DataLoader(torch.arange(6), batch_size=1, num_workers=1)
    return [batch.data.item() for batch in fx.shard(loader, ctx)]


def test_a_loader_on_ranks_may_have_workers(pool):
    assert pool.run(_reads_with_workers) == [[0, 2, 4], [1, 3, 5]]


def _ends_before_its_child(ctx):
    """The child holds whatever its parent had open for longer than the pool waits."""
    if ctx.rank == 1:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_end_of_a_rank_is_seen_while_a_child_of_it_lives(pool):
    first, second = pool.outcomes(_ends_before_its_child)
    assert first is None
    assert isinstance(second, RankFailure) and "ended by SIGKILL" in str(second)


def _leaves_a_child(ctx):
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child


def test_children_of_ranks_end_with_the_pool():
    pool = Cluster(1)
    (child,) = pool.run(_leaves_a_child)
    assert _is_running(child)
    pool.close()
    while _is_running(child):
        time.sleep(0.01)


def _is_running(pid):
    """Whether a process is there that has not ended; whoever inherits it may be slow to see it."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _warns(ctx):
    warnings.warn("an old name", DeprecationWarning, stacklevel=1)
    return ctx.rank


@pytest.mark.parametrize("action", ["error", "ignore"])
def test_a_warning_is_an_error_unless_the_pool_is_told_otherwise(action):
    ranks = Cluster(1, warnings=action)
    try:
        (outcome,) = ranks.outcomes(_warns)
        assert outcome == 0 if action == "ignore" else isinstance(outcome, DeprecationWarning)
    finally:
        ranks.close()
