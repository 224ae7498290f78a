"""Ranks that do what their first argument says."""

import ctypes
import json
import multiprocessing
import os
import sys
import time

RANK = int(os.environ.get("RANK", "0"))


class Here:
    """A class of the main module."""


def double(x):
    return 2 * x


def say(*args):
    if RANK == 0:
        names = ("OMP_NUM_THREADS", "MASTER_ADDR", "WORLD_SIZE")
        found = {name: os.environ[name] for name in names}
        print(json.dumps({"args": args, "file": __file__, "path": sys.path[0], **found}))


def leave(code):
    """Rank 1 leaves with a code, the others would stay."""
    if RANK == 1:
        sys.exit(int(code))
    time.sleep(60)


def crash():
    if RANK == 1:
        ctypes.string_at(0)
    time.sleep(60)


def once(path):
    """Fails in the first attempt only."""
    if RANK == 0 and not os.path.exists(path):
        open(path, "x").close()
        raise OSError("first attempt")
    print("second attempt" if RANK == 0 else "", end="")


def wait():
    os.write(1, f"{os.getpid()}\n".encode())  # whole lines, also when ranks write at once
    time.sleep(60)


def main_module():
    """Other processes find what the main module defines."""
    assert sys.modules["__main__"].Here is Here
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]), flush=True)


def fail():
    """Rank 1 fails, and rank 0 waits for it in a barrier."""
    import fxtrain as fx

    with fx.detect(timeout_s=30) as ctx:
        if ctx.rank == 1:
            raise ValueError("of my own\nin two lines")
        fx.ops.barrier(ctx)


def all_fail():
    raise KeyError("everywhere")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
