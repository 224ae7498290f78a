"""`fx.launch`: a function on ranks of its own, from wherever it is called."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch

import fxtrain as fx
from fxtrain import ops
from fxtrain.errors import LaunchError
from fxtrain.launchers import Failure, LaunchResult, by_cause, describe
from fxtrain.launchers.machine import usable_cores
from tests._errors import raises_code
from tests._patience import patience
from tests.launched._run import PYTHON, SCRIPTS, run, run_fork, run_text

pytestmark = pytest.mark.timeout(120)


def _meet(a, b):
    with fx.detect(device="cpu", timeout_s=300) as ctx:
        seen = ops.gather_objects((ctx.rank, ctx.local_rank, ctx.node_rank), ctx)
        return a + b, seen, torch.full((2,), float(ctx.rank)), torch.get_num_threads()


@pytest.mark.slow
def test_values_come_back_by_rank(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    results = fx.launch(_meet, (1, 2), ranks=2, timeout_s=100 * patience())
    everyone = [(0, 0, 0), (1, 1, 0)]
    assert [(total, seen) for total, seen, _, _ in results] == [(3, everyone)] * 2
    assert [value.tolist() for _, _, value, _ in results] == [[0.0, 0.0], [1.0, 1.0]]
    assert results[0][3] == max(1, len(usable_cores()) // 2)
    assert dict(os.environ) == before


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What came back from the calls of a script, by name."""
    folder = str(tmp_path_factory.mktemp("functions"))
    ended = run_fork(*PYTHON, str(SCRIPTS / "functions.py"), folder)
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


def test_failing_rank_is_named_with_its_traceback(told):
    head, start, place, *rest = told["failing"].splitlines()
    assert head == "Rank 1 of 2 failed: ValueError: of my own"
    assert start == "Traceback (most recent call last):"
    assert place.endswith(", in fail")
    assert rest[0] == '    raise ValueError("of my own")'


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lambda", [2]),
        ("built in", [[3, 1]]),
        ("left well", [None]),
        ("left", "Rank 0 of 1 exited with code 4."),
        ("no end", "Rank 0 of this node exited before the function returned."),
        ("restarted", ["second"]),
        ("SIGINT", True),
    ],
)
def test_what_came_back(told, name, value):
    assert told[name] == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("killed", "Rank 0 of 1 was ended by SIGKILL"),
        ("generator", "cannot be sent back: cannot pickle 'generator' object"),
        ("arguments", "takes 1 positional argument but 2 were given"),
        ("not restarted", "Rank 0 of 1 failed: ValueError: first"),
    ],
)
def test_what_went_wrong(told, name, text):
    assert text in told[name]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who listens where")
def test_a_function_and_its_caller_listen_on_loopback(told):
    for rank, caller in told["sockets"]:
        assert set(rank) == set(caller) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (multiprocessing.get_context("spawn").Queue, "a Queue, cannot be sent .* inheritance"),
        (multiprocessing.Event, "an? Event, cannot be sent"),
        (threading.Lock, "a lock, cannot be sent .* cannot pickle"),
        (lambda: fx.DistContext(), "a DistContext, cannot be sent .* call fx.detect"),
    ],
)
def test_an_argument_that_cannot_be_sent_is_named(value, words):
    with pytest.raises(LaunchError, match=rf"launch: args\[1\], {words}.*returns on each rank"):
        fx.launch(divmod, (7, value()), ranks=1)


def test_time_limit_names_the_ranks_and_ends_them():
    with raises_code("FX700", ": 0, 1."):
        fx.launch(time.sleep, (600,), ranks=2, timeout_s=1)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"fn": 3}, "launch takes a function and its arguments, found a int"),
        (
            {"fn": _meet, "args": ("runs/a")},
            "launch(args=...) takes a tuple of arguments, found a str",
        ),
        (
            {"fn": _meet, "args": fx.Plan()},
            "launch(args=...) takes a tuple of arguments, found a Plan",
        ),
        ({"fn": _meet, "ranks": 0}, "ranks=0): choose a whole number of at least 1"),
        ({"fn": _meet, "ranks": True}, "ranks=True): choose a whole number of at least 1"),
        ({"fn": _meet, "ranks": 2.0}, "ranks=2.0): choose a whole number of at least 1"),
        ({"fn": _meet, "timeout_s": 0}, "a timeout is a number of seconds > 0"),
        ({"fn": len, "args": (threading.Lock(),)}, "cannot pickle '_thread.lock' object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_calls(kwargs, text):
    with pytest.raises(LaunchError) as caught:
        fx.launch(**kwargs)
    assert text in str(caught.value)


# As in a notebook: everything is defined in the session, and the session has used torch.
CELLS = """
import fxtrain as fx, torch
from fxtrain import ops

class Net(torch.nn.Linear):
    pass

def train(x):
    with fx.detect(device="cpu", timeout_s=300) as ctx:
        net = Net(300, 300)
        net(torch.ones(300, 300)).sum().backward()
        total = ops.gather_objects(ctx.rank + x, ctx)
        return total, net, torch.get_num_threads()

a = torch.randn(300, 300, requires_grad=True)
(a @ a).sum().backward()
"""
CALLS = """
results = fx.launch(train, (5,), ranks=2, timeout_s=600)
assert [total for total, _, _ in results] == [[5, 6]] * 2, results
assert all(type(net) is Net for _, net, _ in results)
assert __file__ == "<stdin>"
print("fine", results[0][2])
"""


@pytest.mark.slow
def test_functions_of_a_session_go_by_value():
    ended = run_text(CELLS + CALLS)
    assert (ended.code, ended.out) == (0, "fine 1\n"), ended.err


@pytest.mark.slow
def test_a_session_needs_cloudpickle():
    ended = run_text("import sys; sys.modules['cloudpickle'] = None\n" + CELLS + CALLS)
    assert ended.code == 1
    assert "pip install 'fxtrain[notebook]'" in ended.err.splitlines()[-1]


@pytest.mark.slow
def test_script_without_a_guard_is_told_so():
    ended = run(*PYTHON, str(SCRIPTS / "unguarded.py"), UNGUARDED="1")
    assert ended.code == 1
    assert 'under `if __name__ == "__main__":`' in ended.err


@pytest.mark.slow
def test_ranks_end_with_their_parent(tmp_path):
    text = CELLS + (
        "import os, signal, time\n"
        "def stay(folder):\n"
        "    open(f'{folder}/{os.getpid()}', 'x').close()\n"
        "    time.sleep(600)\n"
        "import threading\n"
        f"folder = {str(tmp_path)!r}\n"
        "def kill():\n"
        "    while len(os.listdir(folder)) < 2: time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=kill, daemon=True).start()\n"
        "fx.launch(stay, (folder,), ranks=2)\n"
    )
    assert run_text(text).code == -signal.SIGKILL  # its pipes closed, so the ranks are gone too
    assert len(list(tmp_path.iterdir())) == 2


def test_lost_peers_come_after_the_cause():
    failures = [
        Failure(rank=0, kind="torch.distributed.DistBackendError", error="x", time_ns=1),
        Failure(rank=1, kind="RuntimeError", error="... Connection closed by peer", time_ns=2),
        Failure(rank=2, code=-signal.SIGTERM),
        Failure(rank=3, kind="ValueError", error="ValueError: mine", time_ns=4),
        Failure(rank=4, kind="ValueError", error="ValueError: mine too", time_ns=5),
        Failure(rank=5, code=-signal.SIGABRT),  # NCCL's watchdog, while it waited for rank 3
    ]
    assert [failure.rank for failure in by_cause(failures)] == [3, 4, 5, 0, 1, 2]
    assert "watchdog" in describe(LaunchResult(ranks=6, failures=(failures[5],)))
