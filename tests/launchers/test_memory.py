"""Whether a rank fell to the kernel's out-of-memory killer, told from the kernel's counters."""

import signal

import pytest

from fxtrain.launchers import (
    Failure,
    LaunchResult,
    MemoryKills,
    count_kills,
    describe,
    keep_tracebacks,
    tell_kills,
)


def _kernel(root, version, *, kills, machine=0, limit):
    """The files of a kernel with one version of control groups."""
    group = {1: "sys/fs/cgroup/memory/job", 2: "sys/fs/cgroup/job"}[version]
    lines = {1: "9:pids:/job\n4:memory:/job\n0::/\n", 2: "0::/job\n"}[version]
    names = {1: ("memory.oom_control", "memory.limit_in_bytes"), 2: ("memory.events", "memory.max")}
    files = {
        "proc/self/cgroup": lines,
        "proc/vmstat": f"nr_free_pages 3\noom_kill {machine}\n",
        f"{group}/{names[version][0]}": f"under_oom 0\noom_kill {kills}\n",
        f"{group}/{names[version][1]}": f"{limit}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_counters_of_the_kernel(version, tmp_path):
    _kernel(tmp_path, version, kills=3, machine=5, limit=2**31)
    found = count_kills(tmp_path)
    assert found == MemoryKills(group=3, machine=5, limit_bytes=2**31, counted=True)


@pytest.mark.parametrize(("version", "limit"), [(1, 2**63 - 4096), (2, "max")])
def test_no_limit(version, limit, tmp_path):
    _kernel(tmp_path, version, kills=0, limit=limit)
    assert count_kills(tmp_path).limit_bytes is None


def test_a_machine_without_counters(tmp_path):
    assert count_kills(tmp_path) == MemoryKills()
    assert tell_kills(MemoryKills(), MemoryKills()) == ""


def _killed(before, after):
    failure = Failure(rank=1, code=-signal.SIGKILL)
    memory = tell_kills(before, after)
    return describe(LaunchResult(ranks=2, failures=(failure,), memory=memory))


def test_a_rank_killed_for_memory_says_so():
    before = MemoryKills(counted=True)
    after = MemoryKills(group=1, machine=1, limit_bytes=3 * 2**29, counted=True)
    assert _killed(before, after).startswith(
        "Rank 1 of 2 was ended by SIGKILL. That was the kernel's out-of-memory killer: the "
        "processes of this job exceeded its memory of 1.5 GiB."
    )
    after = MemoryKills(machine=1, counted=True)
    assert "this machine ran out of memory" in _killed(before, after)
    assert "That was not the kernel's out-of-memory killer" in _killed(before, before)
    assert "run dmesg" in _killed(MemoryKills(), MemoryKills())


def test_tracebacks_of_the_others_are_kept(tmp_path):
    failures = tuple(Failure(rank=rank, error="E: x", traceback=f"of {rank}") for rank in (2, 0))
    place = keep_tracebacks(LaunchResult(ranks=4, failures=failures), str(tmp_path / "logs"))
    assert place is not None and place.parent == tmp_path / "logs"
    kept = {path.name: path.read_text() for path in place.iterdir()}
    assert kept == {"0.txt": "of 0", "2.txt": "of 2"}
    assert keep_tracebacks(LaunchResult(ranks=4, failures=failures[:1]), str(tmp_path)) is None
