"""Ranks that do what their first argument says."""

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

# Of torchrun and ours, Open MPI, MPICH and SLURM.
_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
RANK = int(next((os.environ[name] for name in _NAMES if name in os.environ), "0"))


class Here:
    """A class of the main module."""


def double(x):
    return 2 * x


def say(*args):
    if RANK == 0:
        names = ("OMP_NUM_THREADS", "MASTER_ADDR", "WORLD_SIZE")
        found = {name: os.environ[name] for name in names}
        print(json.dumps({"args": args, "file": __file__, "path": sys.path[0], **found}))


def meet(name, *args):
    """All ranks meet, and rank 0 says who they are, where, and what a variable is."""
    import fxtrain as fx

    with fx.detect(device="cpu", timeout_s=300) as ctx:
        place = (ctx.rank, ctx.local_rank, ctx.node_rank, ctx.num_nodes)
        places = fx.ops.gather_objects(place, ctx)
        total = fx.ops.reduce(float(ctx.rank + 1), ctx, op="sum")
        if ctx.is_main:
            told = {
                "launcher": ctx.launcher,
                "places": places,
                "total": float(total),
                "value": os.environ.get(name),
                "args": sys.argv[1:],
                "cores": sorted(os.sched_getaffinity(0)),
            }
            print(json.dumps(told), flush=True)


def leave(code):
    """Rank 1 leaves with a code, the others would stay."""
    if RANK == 1:
        sys.exit(int(code))
    time.sleep(600)


def crash():
    if RANK == 1:
        ctypes.string_at(0)
    time.sleep(600)


def once(path):
    """Fails in the first attempt only."""
    if RANK == 0 and not os.path.exists(path):
        open(path, "x").close()
        raise OSError("first attempt")
    print("second attempt" if RANK == 0 else "", end="")


def wait():
    os.write(1, f"{os.getpid()}\n".encode())  # whole lines, also when ranks write at once
    time.sleep(600)


def hold():
    """Ranks that are connected say who they are, and stay."""
    import fxtrain as fx

    with fx.detect(device="cpu", timeout_s=300) as ctx:
        fx.ops.barrier(ctx)
        os.write(1, f"{os.getpid()}\n".encode())
        time.sleep(600)


def stubborn(*orders):
    """Ranks that ignore SIGTERM, with a child and a daemon that do so too, each in a file."""
    folder, *rest = orders
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    before = [int(name) for name in os.listdir(folder)]
    if running := [pid for pid in before if is_running(pid)]:
        os.write(1, f"still there: {running}\n".encode())
    subprocess.Popen([sys.executable, "-c", _STAYS, folder, "child"])
    subprocess.Popen([sys.executable, "-c", _STAYS, folder, "daemon"]).wait()
    _note(folder)
    while len(os.listdir(folder)) < len(before) + 3:
        time.sleep(0.02)
    if "fail" in rest:
        sys.exit(3)
    time.sleep(600)


# A daemon forks twice, so that it has another parent and a session of its own.
_STAYS = """
import os, sys, time
if sys.argv[2] == "daemon" and (os.fork() or (os.setsid() or os.fork())):
    os._exit(0)
open(os.path.join(sys.argv[1], str(os.getpid())), "x").close()
time.sleep(600)
"""


def _note(folder):
    open(os.path.join(folder, str(os.getpid())), "x").close()


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def preempted(folder):
    """Waits for SIGUSR1 in the first run, leaves a file, and ends well in the second."""
    saved = os.path.join(folder, f"saved{RANK}")
    if os.path.exists(saved):
        print(f"rank {RANK} went on", flush=True)
        return

    def save(number, frame):
        open(saved, "x").close()
        sys.exit(0)

    signal.signal(signal.SIGUSR1, save)
    open(os.path.join(folder, f"ready{RANK}"), "w").close()
    time.sleep(600)


def come_back(folder):
    """Ranks meet again and again until a node is gone, and once more when it is back."""
    import fxtrain as fx

    with fx.detect(device="cpu", timeout_s=300) as ctx:
        if os.path.exists(os.path.join(folder, "killed")):
            fx.ops.barrier(ctx)
            os.write(1, f"back {ctx.rank}\n".encode())
            return
        open(os.path.join(folder, f"here{ctx.rank}"), "w").close()
        while True:
            fx.ops.barrier(ctx)
            time.sleep(0.1)


def bad_node():
    """Ranks of a node with the variable BAD fail each time, and the others then too."""
    import fxtrain as fx

    with fx.detect(device="cpu", timeout_s=300) as ctx:
        if "BAD" in os.environ:
            open(os.environ["BAD"], "w").close()
            time.sleep(2)
            raise ValueError("a broken device")
        fx.ops.barrier(ctx)
        os.write(1, f"done {ctx.rank} of {ctx.world_size}\n".encode())


def main_module():
    """Other processes find what the main module defines."""
    assert sys.modules["__main__"].Here is Here
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]), flush=True)


def fail():
    """Rank 1 fails, and rank 0 waits for it in a barrier."""
    import fxtrain as fx

    with fx.detect(timeout_s=300) as ctx:
        if ctx.rank == 1:
            raise ValueError("of my own\nin two lines")
        fx.ops.barrier(ctx)


def write_late(text):
    """Rank 1 fails, and rank 0 writes a line before that and when it is told to end."""
    if RANK == 1:
        raise ValueError("of my own")

    def write(number, frame):
        os.write(2, text.encode())
        sys.exit(0)

    os.write(2, text.encode())
    signal.signal(signal.SIGTERM, write)
    time.sleep(600)


def hang(timeout_s):
    """Rank 1 hangs and ignores SIGTERM, and rank 0 waits for it in a barrier."""
    import fxtrain as fx

    with fx.detect(timeout_s=300) as ctx:
        fx.ops.barrier(ctx)
    with fx.detect(timeout_s=float(timeout_s)) as ctx:
        if ctx.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        fx.ops.barrier(ctx)


def leave_meanwhile(how):
    """Rank 1 leaves, and rank 0 waits for it in a barrier."""
    import fxtrain as fx

    with fx.detect(timeout_s=300) as ctx:
        if ctx.rank == 1 and how == "exit":
            sys.exit(3)
        if ctx.rank == 1:
            raise KeyboardInterrupt
        fx.ops.barrier(ctx)


def all_fail():
    raise KeyError("everywhere")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
