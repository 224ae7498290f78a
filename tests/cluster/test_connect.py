"""Connecting for real: missing ranks, ports, devices, closing and connecting anew."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

import fxtrain as fx
from fxtrain import ops
from fxtrain.ops import connecting, opening, rendezvous_store
from fxtrain.testing import Transformer, free_port
from fxtrain.testing.cluster import starter
from tests._errors import raises_code
from tests.cluster._timeouts import with_timeout


def _env(rank, world, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_a_missing_rank_is_named_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(rendezvous_store, "_wait_for", _time_is_up)
    port = free_port()
    said = f"Rank 0 of 3 waited 60 s at 127.0.0.1:{port}, and these ranks never joined: 1, 2"
    with pytest.raises(fx.errors.ContextError, match=said):
        fx.detect(_env(0, 3, port), device="cpu", timeout_s=60)


def _time_is_up(*_):
    raise dist.DistStoreError


@pytest.mark.slow
def test_a_missing_rank_is_named_within_the_timeout():
    with raises_code("FX102", "5 s", "1, 2"):
        fx.detect(_env(0, 3, free_port()), device="cpu", timeout_s=5)


def test_an_address_where_nobody_listens_is_named():
    port = free_port()
    with raises_code("FX102", f"127.0.0.1:{port}", "0.5 s"):
        fx.detect(_env(1, 2, port), device="cpu", timeout_s=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_with_variables_of_a_launcher_that_is_gone_says_whom_it_waits_for(
    rank, monkeypatch, caplog
):
    class Timer:
        """Its time comes at once where nobody serves a store, and never for the one who does."""

        def __init__(self, seconds, function, arguments):
            self.start = lambda: function(*arguments) if rank else None
            self.cancel = lambda: None

    monkeypatch.setattr("threading.Timer", Timer)
    monkeypatch.setattr(rendezvous_store, "_QUIET_S", 0.2)
    port = free_port()
    with pytest.raises(fx.errors.ContextError):
        fx.detect(
            _env(rank, 2, port) | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            device="cpu",
            timeout_s=0.5 if rank else 2,
        )
    (line,) = caplog.messages
    awaited = ("rank 1", "the store that rank 0 serves")[rank]
    assert line == (
        f"Rank {rank} of 2 has waited 0.2 s for {awaited} at 127.0.0.1:{port}. "
        f"To run on this process alone, unset RANK and WORLD_SIZE."
    )


def _left_while_connecting(rank, port, answers):
    """Ranks that have time to join, and a second to open the group."""
    if rank == 1:
        opening.check_own_device = lambda *_: os._exit(0)
    connecting.open_group = lambda topology, device, store, _, **options: opening.open_group(
        topology, device, store, timedelta(seconds=1), **options
    )
    try:
        fx.detect(_env(rank, 3, port), device="cpu", timeout_s=60)
    except fx.errors.ContextError as error:
        answers.put((rank, str(error)))


@pytest.mark.slow
def test_a_rank_that_is_lost_while_the_group_opens_is_named_within_the_timeout():
    """gloo itself would wait five times as long."""
    forks = starter()
    answers, port = forks.Queue(), free_port()
    workers = [
        forks.Process(target=_left_while_connecting, args=(r, port, answers)) for r in range(3)
    ]
    for worker in workers:
        worker.start()
    found = sorted(answers.get(timeout=100) for _ in range(2))
    for worker in workers:
        worker.join(20)
    for rank, (_, text) in zip((0, 2), found, strict=True):
        assert f"Rank {rank} of 3 could not open the process group 'gloo'." in text
        assert "  rank 1: never began to open it\n" in text
        assert re.search("within 1 s|after 1000ms", text)


def _left_in_a_collective(rank, port, answers):
    with fx.detect(_env(rank, 2, port), device="cpu", timeout_s=60) as ctx:
        group = ctx.comm.group
        ops.barrier(ctx)
        if rank == 1:
            os._exit(0)
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            answers.put((str(error), rendezvous_store.first_line(error)))
            answers.close()
            answers.join_thread()
            os._exit(0)


def test_what_gloo_adds_for_everybody_is_cut():
    """Its advice, and its wish of good luck."""
    forks = starter()
    answers, port = forks.Queue(), free_port()
    workers = [
        forks.Process(target=_left_in_a_collective, args=(r, port, answers)) for r in range(2)
    ]
    for worker in workers:
        worker.start()
    said, shown = answers.get(timeout=100)
    for worker in workers:
        worker.join(20)
    assert "/gloo/" in said
    advises = "typically caused" in said and "GLHF" in said
    assert advises or torch.__version__ < "2.13"  # torch 2.9 has an older gloo, without advice
    assert re.fullmatch(r"(Connection closed by peer|Read error) \[127[^!]*\.", shown)


@pytest.mark.parametrize(
    ("device", "words"), [("cuda:0", "only the CPU"), ("gpu", "not a device"), ("mps", "only")]
)
def test_a_device_that_is_not_there_is_refused(device, words):
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(fx.errors.ContextError, match=words):
        fx.detect({}, device=device)


def test_a_timeout_is_that_of_the_context():
    with fx.detect({}, device="cpu", timeout_s=7) as ctx:
        assert ctx.comm.timeout_s == 7


def _connect_twice(rank, port, answers):
    torch.set_num_threads(1)
    sums = []
    for _ in range(2):
        with fx.detect(_env(rank, 2, port), device="cpu", timeout_s=60) as ctx:
            sums.append(ops.reduce(rank + 1, ctx, op="sum"))
        fx.close(ctx)
    answers.put((rank, sums))


def test_a_process_can_connect_close_and_connect_again():
    forks = starter()
    answers, port = forks.Queue(), free_port()
    workers = [forks.Process(target=_connect_twice, args=(r, port, answers)) for r in range(2)]
    for worker in workers:
        worker.start()
    assert sorted(answers.get(timeout=100) for _ in workers) == [(0, [3, 3]), (1, [3, 3])]
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0


def _open_a_mesh(rank, port, answers):
    """Ranks that torch asks for a control group of which they are no member, and sums along axes.

    Each of these would be a split of NCCL's communicator.
    """
    torch.set_num_threads(1)
    real, asked = distributed_c10d._new_process_group_helper, []

    def helper(size, place, ranks, *args, **settings):
        if ranks and rank not in ranks and settings.get("group_desc") == "fxtrain control":
            asked.append(ranks)
        return real(size, place, ranks, *args, **settings)

    distributed_c10d._new_process_group_helper = helper
    sums = []
    for _ in range(2):  # a second connection finds no addresses of the first
        mesh = fx.Mesh(replicate=2, tensor=2)
        with fx.detect(_env(rank, 4, port), device="cpu", mesh=mesh, timeout_s=60) as ctx:
            sums += [ops.reduce(rank, ctx.axis(axis), op="sum") for axis in ("tensor", "replicate")]
            sums.append(ops.gather_objects(rank, ctx.axis("tensor")))
        fx.close(ctx)
    answers.put((rank, asked, sums))


@pytest.mark.slow
def test_only_members_open_the_control_group_of_an_axis():
    forks = starter()
    answers, port = forks.Queue(), free_port()
    workers = [forks.Process(target=_open_a_mesh, args=(r, port, answers)) for r in range(4)]
    for worker in workers:
        worker.start()
    found = sorted(answers.get(timeout=100) for _ in workers)
    for worker in workers:
        worker.join(20)
    for rank, asked, sums in found:
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert asked == []
        assert sums == [sum(row), sum(column), row] * 2


def _axes(ctx):
    """Traffic along the axes of a mesh over groups that are there already."""
    meshed = fx.detect({}, device="cpu", mesh=fx.Mesh(replicate=2, tensor=2), timeout_s=60)
    return (
        ops.gather_objects(ctx.rank, meshed.axis("tensor")),
        ops.gather_objects(ctx.rank, meshed.axis("replicate")),
        ops.reduce(ctx.rank, meshed, op="sum"),
    )


@pytest.mark.slow
def test_ops_work_along_every_axis(clusters):
    found = clusters[4].run(_axes)
    assert [tensor for tensor, _, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [replicate for _, replicate, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [total for _, _, total in found] == [6] * 4


def _wrong_on_an_axis(ctx):
    meshed = fx.detect({}, device="cpu", mesh=fx.Mesh(replicate=2, tensor=2), timeout_s=60)
    if ctx.rank < 2:
        ops.gather(torch.ones(1 + ctx.rank), meshed.axis("tensor"))
    return "fine"


@pytest.mark.slow
def test_an_error_on_one_axis_stays_on_its_ranks(clusters):
    found = clusters[4].outcomes(_wrong_on_an_axis)
    assert [type(one).__name__ for one in found] == ["CollectiveError"] * 2 + ["str"] * 2
    assert "axis tensor0" in str(found[0])


def _groups_in(ctx):
    """How many groups there are before, inside, with one sharded model and two, and after."""
    counts = [len(distributed_c10d._world.pg_map)]
    plan = fx.Plan(strategy=fx.FSDP(shard=2))
    with fx.detect({}, device="cpu", mesh=fx.Mesh(tensor=2, replicate=2), timeout_s=60) as placed:
        counts.append(len(distributed_c10d._world.pg_map))
        assert ops.reduce(1, placed.axis("tensor"), op="sum") == 2
        ops.duplicate(placed)
    counts.append(len(distributed_c10d._world.pg_map))
    with fx.detect({}, device="cpu", timeout_s=60) as plain:
        for _ in range(2):
            fx.wrap(Transformer(), plain, plan)
            counts.append(len(distributed_c10d._world.pg_map))
    return [*counts, len(distributed_c10d._world.pg_map), ops.reduce(1, ctx, op="sum")]


@pytest.mark.slow
def test_what_a_context_opens_is_shared_by_models_and_closes_with_it(clusters):
    for before, inside, between, one, two, after, ranks in clusters[4].run(_groups_in):
        assert inside == before + 3  # for control, and one for each of two axes
        assert before == between == after
        assert one == two == before + 3  # for control, and the axes of the sharded model
        assert ranks == 4


def _closed_at_once(ctx):
    for _ in range(5):
        with fx.detect({}, device="cpu", timeout_s=60) as short:
            ops.duplicate(short)
    return ops.reduce(1, ctx, op="sum")


@pytest.mark.slow
def test_a_duplicate_may_be_closed_at_once(clusters):
    assert clusters[4].run(_closed_at_once) == [4] * 4


def _skips_the_duplicate(ctx):
    if ctx.rank == 0:
        ops.duplicate(with_timeout(ctx))


def test_a_rank_that_skips_a_duplicate_is_named(pair):
    first, second = pair.outcomes(_skips_the_duplicate)
    assert second is None
    assert isinstance(first, fx.CollectiveError)
    assert "rank 1: never joined this duplicate" in str(first)
    pair.close()  # torch counts groups, and one rank has opened fewer


def _ends_after_the_duplicate(ctx):
    copy = ops.duplicate(ctx)
    if ctx.rank == 1:
        os._exit(9)
    ops.reduce(1, copy)


def test_a_rank_that_ends_after_a_duplicate_is_noticed(pair):
    """At once, since the ranks have connected; gloo would wait five timeouts to connect."""
    first, _ = pair.outcomes(_ends_after_the_duplicate)
    assert isinstance(first, fx.CollectiveError), first


def _join(port, rank, timeout_s, *, served=False):
    """What a rank of three says."""
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if served else {}
    with pytest.raises(fx.errors.ContextError) as raised:
        fx.detect(_env(rank, 3, port) | variables, device="cpu", timeout_s=timeout_s)
    return str(raised.value)


@pytest.mark.parametrize("first", [0, 1])
def test_all_ranks_that_have_joined_learn_which_never_did(first, monkeypatch):
    """Before rank 0, which serves the store, ends."""
    wait_for, port = rendezvous_store._wait_for, free_port()

    def wait(store, keys, topology, timeout_s):
        if topology.rank == first:  # whose time is up when the other rank has joined
            store.wait([keys[1 - first]])
            raise dist.DistStoreError
        wait_for(store, keys, topology, timeout_s)

    monkeypatch.setattr(rendezvous_store, "_wait_for", wait)
    with ThreadPoolExecutor() as pool:
        one, other = pool.map(partial(_join, port), (0, 1), (60, 60))
    said = f"Rank {first} of 3 waited 60 s at 127.0.0.1:{port}, and these ranks never "
    assert one == other and one.startswith(f"{said}joined: 2. Check their output")


def test_a_store_that_is_lost_before_all_have_joined():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor() as pool:
        said = pool.submit(_join, server.port, 1, 60, served=True)
        server.wait(["fxtrain/0/1/hello/1"])
        port = server.port
        del server
        assert f"Rank 1 of 3 lost the store at 127.0.0.1:{port}, which" in said.result()


FILES = """
import resource
from fxtrain.errors import ContextError
from fxtrain.ops.opening import allow_files

resource.setrlimit(resource.RLIMIT_NOFILE, (50, 300))
allow_files(2)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)
allow_files(1024)
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
try:
    allow_files(1024)
except ContextError as error:
    print(error)
"""


def test_a_process_may_open_as_many_files_as_the_system_permits_or_learns_that_they_are_too_few():
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=True)
    assert "1024 ranks need about 84 open files" in done.stdout
    assert "this process may have 60. Raise the limit" in done.stdout
    assert done.stdout.endswith("[FX102]\n")


def _sockets():
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(name).startswith("socket:") for name in names if os.path.exists(name))


def _connections(ctx):
    """Sockets of a context with axes, of which it has used the control group and one axis."""
    before = _sockets()
    with fx.detect(device="cpu", mesh=fx.Mesh(shard=2), timeout_s=ctx.comm.timeout_s) as inner:
        ops.barrier(inner)
        ops.barrier(inner.axis("shard"))
        return _sockets() - before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_rank_connects_with_those_to_which_it_sends(clusters):
    # A gloo group listens, and connects with both neighbors in the ring, or with the other rank.
    for opened in clusters[4].run(_connections):
        assert opened <= (1 + 2) + (1 + 1) + 2 * 1 + 1
