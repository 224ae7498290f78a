"""Whether a rank fell to the kernel's out-of-memory killer, told from the kernel's counter."""

import signal

import pytest

from fxtrain.launchers import Failure, LaunchResult, describe, outcome
from fxtrain.launchers.outcome import keep_tracebacks


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("nr_free_pages 3\noom_kill 2\n", "oom_kill 3\n", "SIGKILL. Most likely, that was the"),
        ("oom_kill 2\n", "oom_kill 2\n", "That was not the kernel's out-of-memory killer"),
        ("nr_free_pages 3\n", "nr_free_pages 3\n", "run dmesg"),
    ],
)
def test_a_rank_killed_for_memory_says_so(before, after, says, tmp_path, monkeypatch):
    counters = tmp_path / "vmstat"
    monkeypatch.setattr(outcome, "_KERNEL_COUNTERS", counters)
    assert outcome.count_memory_kills() is None  # a system without the file
    counters.write_text(before)
    kills = outcome.count_memory_kills()
    counters.write_text(after)
    failure = Failure(rank=1, code=-signal.SIGKILL)
    result = LaunchResult(ranks=2, failures=(failure,), memory=outcome.describe_memory_kills(kills))
    assert says in describe(result)


def test_tracebacks_of_the_others_are_kept(tmp_path):
    failures = tuple(Failure(rank=rank, error="E: x", traceback=f"of {rank}") for rank in (2, 0))
    place = keep_tracebacks(LaunchResult(ranks=4, failures=failures), str(tmp_path / "logs"))
    assert place is not None and place.parent == tmp_path / "logs"
    kept = {path.name: path.read_text() for path in place.iterdir()}
    assert kept == {"0.txt": "of 0", "2.txt": "of 2"}
    assert keep_tracebacks(LaunchResult(ranks=4, failures=failures[:1]), str(tmp_path)) is None
