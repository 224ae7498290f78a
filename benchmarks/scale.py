"""What the control plane costs with the number of ranks: counted on real and simulated ranks.

For each call: rounds that wait for each other, messages and bytes that a rank sends, connections
of a rank and questions to the store; and the times on real ranks. Then what the manifest of a
large run costs, with made-up shards in one process.

python -m benchmarks.scale [--ranks 2,4,8] [--simulated 128,1024,4096] [--shards 1024x500]
"""

import argparse
import collections
import gc
import os
import statistics
import tempfile
import time
import warnings
from datetime import timedelta

import attrs
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from benchmarks._common import show
from fxtrain._host_memory import process_memory
from fxtrain.checkpoint.manifest import (
    DataFile,
    Manifest,
    StoredBox,
    StoredTensor,
    dump_manifest,
    load_manifest,
    packed,
)
from fxtrain.checkpoint.reading import overlapping
from fxtrain.checkpoint.write_plan import choose_writers
from fxtrain.ops import rendezvous_store
from fxtrain.ops.transport.pickled import dump, unpickle_all
from fxtrain.testing import count_collectives, fake_world

REPEATS = 20
# Rounds of gloo's own collectives on N ranks: those around its ring, and along a tree.
ROUNDS = {
    "all_gather": lambda ranks: ranks - 1,
    "all_reduce": lambda ranks: 2 * (ranks - 1),
    "reduce_scatter": lambda ranks: ranks - 1,
    "broadcast": lambda ranks: (ranks - 1).bit_length(),
    "recv": lambda _: 1,
}


class CountedStore(dist.Store):
    """Passes questions on to another store, and counts them."""

    def __init__(self, store):
        super().__init__()
        self.store, self.asked = store, 0

    def _ask(self, name, *args):
        self.asked += 1
        return getattr(self.store, name)(*args)

    def set(self, key, value):
        return self._ask("set", key, value)

    def get(self, key):
        return self._ask("get", key)

    def add(self, key, amount):
        return self._ask("add", key, amount)

    def check(self, keys):
        return self._ask("check", keys)

    def wait(self, keys, timeout=timedelta(seconds=60)):
        return self._ask("wait", keys, timeout)

    def compare_set(self, key, expected, desired):
        return self._ask("compare_set", key, expected, desired)


def _sockets():
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:  # that of this list
            continue
    return count


@attrs.frozen(kw_only=True)
class Row:
    """What a call costs a rank."""

    rounds: int
    messages: int
    size: int
    sockets: int = 0
    asked: int = 0
    seconds: float = 0.0


def _row(traffic, ranks, **more):
    kinds = traffic.counts
    received = kinds.get("recv", 0)
    rounds = sum(ROUNDS[kind](ranks) * n for kind, n in kinds.items() if kind in ROUNDS)
    hops = rounds - received
    return Row(
        rounds=rounds,
        messages=kinds.get("send", 0) + hops,
        size=sum(_bytes(kind, size, ranks) for kind, size in traffic.bytes.items()),
        **more,
    )


def _bytes(kind, size, ranks):
    """What a rank sends for a collective in which it has so many bytes."""
    if kind == "recv":
        return 0
    return size * (ranks - 1) if kind == "all_gather" else size


def _linear(params):
    return torch.optim.SGD(params, lr=0.1)


def _calls(ctx, folder):
    """The calls that are measured, by name; each leaves the ranks as they were."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = fx.wrap(net, ctx, fx.Plan(nonfinite="skip"), optimizer=_linear)
    data = fx.shard(DataLoader(torch.randn(4 * ctx.world_size, 4), batch_size=2), ctx)
    batch = next(iter(data))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    small = torch.zeros(2, dtype=torch.float64)
    calls = {
        "wrap": lambda: fx.wrap(nn.Linear(4, 1), ctx, optimizer=_linear),
        "gather of 16 bytes": lambda: fx.ops.gather(small, ctx),
        "reduce": lambda: fx.ops.reduce(small, ctx),
        "barrier": lambda: fx.ops.barrier(ctx),
        "agree": lambda: fx.ops.agree(7, ctx),
        "any_rank, as fit after an update": lambda: fx.ops.any_rank(0, ctx),
    }
    if not ctx.comm.simulated:
        calls['step, nonfinite="skip"'] = lambda: fx.step(ctx, batch, fns)
        calls["save"] = lambda: fx.save(folder, ctx, model, position=batch.position, keep_last=1)
        calls["restore"] = lambda: fx.restore(folder, ctx, model)
    return calls


def _updates(ctx, folder):
    """An update of fit, without what the first and the last one do."""
    net = nn.Linear(4, 1)
    model = fx.wrap(net, ctx, optimizer=_linear)
    loader = fx.shard(DataLoader(torch.randn(80 * ctx.world_size, 4), batch_size=2), ctx)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    with fx.fit(
        ctx, fns, loader, folder, updates=40, to=(), show=False, save_epochs=False
    ) as reports:
        for report in reports:
            if report.position.updates == 2 + REPEATS:
                reports.stop()
            yield


def _measure(ctx, folder):
    rows = {}
    ranks = ctx.world_size
    for name, call in _calls(ctx, folder).items():
        call()  # the first time connects, or does more once
        before = _sockets()
        with count_collectives() as traffic:
            call()
        seconds = []
        for _ in range(1 if ctx.comm.simulated else REPEATS):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        rows[name] = _row(
            traffic, ranks, sockets=_sockets() - before, seconds=statistics.median(seconds)
        )
    if not ctx.comm.simulated:
        updates = _updates(ctx, f"{folder}-fit")
        next(updates)
        with count_collectives() as traffic:
            next(updates)
        started = time.perf_counter()
        for _ in range(REPEATS // 2):
            next(updates)
        taken = (time.perf_counter() - started) / (REPEATS // 2)
        rows["an update of fit"] = _row(traffic, ranks, seconds=taken)
        collections.deque(updates, maxlen=0)
    return rows


def on_rank(folder):
    """The rows of one real rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counted = []
    connect = rendezvous_store._connected

    def connected(*args):
        counted.append(CountedStore(connect(*args)))
        return counted[0]

    rendezvous_store._connected = connected
    before, started = _sockets(), time.perf_counter()
    with count_collectives() as traffic:
        ctx = fx.detect(device="cpu", timeout_s=300)
    with ctx:
        first = _row(
            traffic,
            ctx.world_size,
            sockets=_sockets() - before,
            asked=counted[0].asked,
            seconds=time.perf_counter() - started,
        )
        # Another thread opens the default group, in rounds of one byte.
        rounds = (ctx.world_size - 1).bit_length()
        first = attrs.evolve(
            first,
            rounds=first.rounds + rounds,
            messages=first.messages + rounds,
            size=first.size + rounds,
        )
        return {"detect": first, **_measure(ctx, folder)}


def simulated(ranks):
    """The rows of rank 1 among simulated ones."""
    warnings.simplefilter("ignore")
    with fake_world(ranks, rank=1) as ctx, tempfile.TemporaryDirectory() as folder:
        return _measure(ctx, folder)


def _text(row):
    size = f"{row.size / 1000:.1f} kB" if row.size >= 1000 else f"{row.size} B"
    return f"{row.rounds} / {row.messages} / {size}"


def show_calls(real, fake):
    """A table of rounds, messages and bytes of a rank, and others of what only real ranks have."""
    of_ranks = {n: fx.launch(on_rank, (tempfile.mkdtemp(),), ranks=n)[1] for n in real}
    of_ranks |= {n: simulated(n) for n in fake}
    names = dict.fromkeys(name for rows in of_ranks.values() for name in rows)
    columns = ["rounds / messages / bytes", *(f"{n} ranks" for n in of_ranks)]
    table = [
        [name, *(_text(rows[name]) if name in rows else "" for rows in of_ranks.values())]
        for name in names
    ]
    show("What a rank sends", columns, table)
    columns = ["milliseconds", *(f"{n} ranks" for n in real)]
    table = [[name, *(f"{1e3 * of_ranks[n][name].seconds:.2f}" for n in real)] for name in names]
    show("On this machine", columns, table)
    columns = ["of a rank", *(f"{n} ranks" for n in real)]
    table = [
        ["sockets after detect", *(str(of_ranks[n]["detect"].sockets) for n in real)],
        ["sockets after all calls", *(str(_total(of_ranks[n])) for n in real)],
        ["questions to the store in detect", *(str(of_ranks[n]["detect"].asked) for n in real)],
    ]
    show("Connections", columns, table)


def _total(rows):
    return sum(row.sockets for row in rows.values())


def _manifest(ranks, tensors):
    """The manifest of an FSDP run, whose ranks have a shard of each tensor."""
    header, shard = 4096, 4096
    names = [f"rank-{rank:05d}.safetensors" for rank in range(ranks)]

    def stored(number):
        parts = [
            StoredBox(
                file=name,
                offset=header + number * shard,
                start=(rank, 0),
                shape=(1, shard // 4),
                digests=(f"{number * ranks + rank:032x}",),
            )
            for rank, name in enumerate(names)
        ]
        return StoredTensor(dtype="float32", shape=(ranks, shard // 4), parts=tuple(parts))

    file = DataFile(size=header + tensors * shard, header=header, digest="0" * 32)
    return Manifest(
        versions={},
        topology={"world_size": ranks, "order": 1},
        position=fx.Position(),
        metric=None,
        models={},
        extra=None,
        tensors={f"model/layers.{number}": stored(number) for number in range(tensors)},
        aliases={},
        own=tuple({} for _ in range(ranks)),
        files=dict.fromkeys(names, file),
    )


def show_manifest(ranks, tensors):
    """What saving and restoring cost rank 0 and another rank, of the manifest alone."""
    names = [f"rank-{rank:05d}.safetensors" for rank in range(ranks)]
    rows = []

    def timed(what, run):
        gc.collect()
        before = process_memory()[0]
        started = time.process_time()  # one thread, whatever else the machine does
        made = run()
        seconds = time.process_time() - started
        # The highest so far: of the steps, each needs more than those before it, or counts as 0.
        peak = process_memory()[1]
        rows.append([what, f"{seconds:.2f}", f"{max(0, peak - before) / 1e6:.0f}"])
        return made

    offers = [
        {(f"model/layers.{number}", (rank, 0)): (4096, None, False) for number in range(tensors)}
        for rank in range(ranks)
    ]
    timed("rank 0: choose who writes what", lambda: choose_writers(offers, {}))
    manifest = _manifest(ranks, tensors)
    raw = timed("rank 0: write the manifest", lambda: dump_manifest(manifest))
    checked = timed("rank 0: read and check it", lambda: load_manifest(raw))
    ctx = fx.DistContext()
    sent = timed("rank 0: pack it for the others", lambda: dump(packed(checked), ctx))
    (received,) = timed("other: unpack it", lambda: unpickle_all("restore", {0: sent}, ctx))

    def overlaps():
        for name in received.tensors:
            box = torch.empty(1, 1024)
            list(overlapping(received.tensors[name], (7, 0), box.shape))

    timed("other: find its shard of each tensor", overlaps)
    title = f"FSDP on {ranks} ranks, {tensors} tensors: {len(raw) / 1e6:.0f} MB of manifest, "
    title += f"{sent.numel() / 1e6:.0f} MB sent to each rank, {len(names)} files"
    show(title, ["", "seconds of a CPU", "MB of memory at most"], rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--simulated", default="128,1024,4096")
    parser.add_argument("--shards", default="1024x500")
    words = parser.parse_args()
    real, fake = ([int(n) for n in each.split(",") if n] for each in (words.ranks, words.simulated))
    if real or fake:
        show_calls(real, fake)
    if words.shards:
        show_manifest(*map(int, words.shards.split("x")))


if __name__ == "__main__":
    main()
