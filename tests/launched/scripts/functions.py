"""Calls `fx.launch` in several ways, and prints as JSON what came back."""

import json
import os
import signal
import sys

import fxtrain as fx
from fxtrain import ops
from fxtrain.errors import LaunchError
from tests.launched._sockets import addresses_of


def fail(rank):
    with fx.detect(device="cpu", timeout_s=300) as ctx:
        if ctx.rank == rank:
            raise ValueError("of my own")
        ops.barrier(ctx)


def leave(code):
    raise SystemExit(code)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_at_once():
    os._exit(0)


def generator():
    return (x for x in range(3))


def one(x):
    return x


def fails_once(path):
    try:
        open(path, "x").close()
    except FileExistsError:
        return "second"
    raise ValueError("first")


def sockets(caller):
    with fx.detect(device="cpu", timeout_s=300) as ctx:
        ops.barrier(ctx)
        return addresses_of(os.getpid()), addresses_of(caller)


def main(folder):
    """Make the calls."""
    calls = {
        "failing": (fail, (1,), 2, 0),
        "lambda": (lambda x: x + 1, (1,), 1, 0),
        "built in": (divmod, [7, 2], 1, 0),
        "left well": (leave, (0,), 1, 0),
        "left": (leave, (4,), 1, 0),
        "killed": (die, (), 1, 0),
        "no end": (exit_at_once, (), 1, 0),
        "generator": (generator, (), 1, 0),
        "arguments": (one, (1, 2), 1, 0),
        "restarted": (fails_once, (f"{folder}/a",), 1, 1),
        "not restarted": (fails_once, (f"{folder}/b",), 1, 0),
        "sockets": (sockets, (os.getpid(),), 2, 0),
    }
    told = {}
    for name, (fn, args, ranks, restarts) in calls.items():
        try:
            told[name] = fx.launch(fn, args, ranks=ranks, restarts=restarts, timeout_s=300)
        except LaunchError as error:
            told[name] = error.message
    told["SIGINT"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
