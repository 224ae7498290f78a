"""Checkpoints under kill -9 at random moments, and under damage of their files.

python -m benchmarks.faults [kills] [flips]
"""

import collections
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings

import torch
from torch import nn

import fxtrain as fx
from benchmarks._common import console, show
from fxtrain.testing import free_port

KILLS, FLIPS = 200, 500
WIDTH = 512  # 1 MB a layer
WAIT_S = 60
HEARD, LOST = 7, 8  # how a rank ends whose peer was killed


def _net():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def _fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _train(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    fx.ops.apply(model)


def _work(rank, ranks, port, folder, background, first, told):
    """Save without end; every finished save is told to the parent."""
    env = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ctx = fx.detect({name: str(value) for name, value in env.items()}, device="cpu", timeout_s=30)
    model = fx.wrap(_net(), ctx, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    update = first
    while True:
        _fill(model, update)
        position = fx.Position(updates=update)
        saving = fx.save(folder, ctx, model, position=position, keep_last=2, background=background)
        _train(model)
        saving.result()
        if ctx.is_main:
            os.write(told, update.to_bytes(8, "little"))
        update += 1


def _start(ranks, folder, background, first):
    """(process ids, pipe on which finished saves are told)"""
    here, there = os.pipe()
    port = free_port()
    processes = []
    for rank in range(ranks):
        process = os.fork()
        if not process:
            os.close(here)
            code = LOST
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                _work(rank, ranks, port, folder, background, first, there)
            except fx.CheckpointError:
                code = HEARD
            finally:
                os._exit(code)
        processes.append(process)
    os.close(there)
    return processes, here


def _told(pipe):
    """The update of the next finished save; None once nobody is left to tell."""
    found = os.read(pipe, 8)
    return int.from_bytes(found, "little") if found else None


def _kill_once(draw, folder, ranks, background, first):
    """Kill one rank or all of them while they save; what was found afterwards."""
    processes, pipe = _start(ranks, folder, background, first)
    last = _told(pipe)
    started = time.monotonic()
    last = _told(pipe)
    if last is None:
        raise RuntimeError("The savers ended before they were killed.")
    time.sleep(draw.uniform(0, 1.5 * (time.monotonic() - started)))
    victims = processes if draw.random() < 0.5 else [draw.choice(processes)]
    for process in victims:
        os.kill(process, signal.SIGKILL)
    found = collections.Counter()
    for process in processes:
        code = os.waitstatus_to_exitcode(_ended(process))
        if process not in victims:
            found["survivors"] += 1
            found["survivors with a CheckpointError"] += code == HEARD
    while (update := _told(pipe)) is not None:
        last = update
    os.close(pipe)
    return found + _look(folder, last)


def _ended(process):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    return os.waitpid(process, 0)[1]


def _look(folder, last):
    """What the kill left, and whether it can be trusted."""
    left = [name for name in os.listdir(folder) if name.startswith(".partial-")]
    found = collections.Counter({"kills": 1, "in the middle of a save": bool(left)})
    newest = fx.latest(folder)
    try:
        found["latest verifies"] += fx.checkpoint.verify(newest).path == newest
    except fx.CheckpointError:
        found["latest verifies"] += 0
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(_net(), ctx)
        try:
            updates = fx.restore(newest, ctx, model).position.updates
        except fx.CheckpointError:
            updates = -2
        whole = all(bool((parameter == updates).all()) for parameter in model.parameters())
    found["corrupt restores"] += not whole
    found["finished saves lost"] += updates < last
    return found


def _kills(draw, total):
    rows = {}
    for ranks in (2, 4):
        for background in (False, True):
            found = collections.Counter()
            with tempfile.TemporaryDirectory() as folder:
                for number in range(total // 4):
                    found += _kill_once(draw, folder, ranks, background, 1_000 * number)
            rows[f"{ranks} ranks, {'background' if background else 'synchronous'}"] = found
    return rows


def _checkpoint(folder):
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(128, 128), ctx, optimizer=lambda p: torch.optim.AdamW(p))
        return fx.save(folder, ctx, model, extra={"mean": torch.ones(99)}).path


def _complaint(path, restoring):
    """What `verify` or `restore` says of a checkpoint."""
    try:
        if not restoring:
            fx.checkpoint.verify(path)
            return ""
        with fx.detect(env={}, device="cpu") as ctx:
            model = fx.wrap(nn.Linear(128, 128), ctx, optimizer=lambda p: torch.optim.AdamW(p))
            fx.restore(path, ctx, model)
    except fx.CheckpointError as error:
        return str(error)
    return ""


def _flip(path, place, change):
    with open(path, "r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ change]))


def _flips(draw, total):
    """Bytes changed at random over all files, and how often that was found and named."""
    with tempfile.TemporaryDirectory() as folder:
        path = _checkpoint(folder)
        sizes = {name: os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)}
        found = collections.Counter()
        for number in range(total):
            # Every fifth in the manifest, which is small.
            names = ["manifest.json"] if number % 5 == 0 else sorted(sizes)
            (name,) = draw.choices(names, [sizes[name] for name in names])
            place, change = draw.randrange(sizes[name]), draw.randrange(1, 256)
            _flip(os.path.join(path, name), place, change)
            found["verify"] += name in _complaint(path, restoring=False)
            found["restore"] += name in _complaint(path, restoring=True)
            _flip(os.path.join(path, name), place, change)
        if _complaint(path, restoring=False) or _complaint(path, restoring=True):
            raise RuntimeError("The checkpoint was not put back as it was.")
    return ["flipped bytes", total, found["verify"], found["restore"]]


def _cut(draw, path, name):
    os.truncate(os.path.join(path, name), draw.randrange(os.path.getsize(os.path.join(path, name))))


def _missing(draw, path, name):
    os.remove(os.path.join(path, name))


def _of_another(draw, path, name):
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(_checkpoint(folder), name), os.path.join(path, name))


def _damages(draw, each):
    rows = []
    names = ["manifest.json", "rank-00000.safetensors"]
    for what, damage in {"cut": _cut, "missing": _missing, "of another save": _of_another}.items():
        found = collections.Counter()
        for number in range(each):
            with tempfile.TemporaryDirectory() as folder:
                path = _checkpoint(folder)
                damage(draw, path, names[number % 2])
                found["verify"] += bool(_complaint(path, restoring=False))
                found["restore"] += bool(_complaint(path, restoring=True))
        rows.append([f"files {what}", each, found["verify"], found["restore"]])
    return rows


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asked = [int(word) for word in sys.argv[1:3]]
    kills, flips = [*asked, *(KILLS, FLIPS)[len(asked) :]]
    seed = random.randrange(1 << 32)
    console.print(f"seed {seed}")
    draw = random.Random(seed)
    rows = [_flips(draw, flips), *_damages(draw, 20)]
    show(
        "Damage of a checkpoint's files",
        ["damage", "times", "found by verify", "found by restore"],
        [[str(cell) for cell in row] for row in rows],
    )
    facts = [
        "kills",
        "in the middle of a save",
        "corrupt restores",
        "latest verifies",
        "finished saves lost",
        "survivors",
        "survivors with a CheckpointError",
    ]
    found = _kills(draw, kills)
    rows = [[fact, *(str(one[fact]) for one in found.values())] for fact in facts]
    rows = [[*row, str(sum(map(int, row[1:])))] for row in rows]
    show("kill -9 of one rank or of all, at random moments", ["", *found, "all"], rows)


if __name__ == "__main__":
    main()
