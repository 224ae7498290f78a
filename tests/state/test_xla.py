"""XLA where torch_xla is absent or of another torch, and what needs no device."""

import contextlib
import importlib
import importlib.metadata
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import fxtrain as fx
from fxtrain.backends.core.module_changes import xla_problems
from fxtrain.backends.xla import xla_runtime
from fxtrain.backends.xla.strategy import RecompilationLog
from fxtrain.data import to_device
from fxtrain.errors import ContextError
from fxtrain.state.topology import Topology
from tests._errors import raises_code


@pytest.fixture
def absent(monkeypatch):
    """No torch_xla, whether this environment has one or not."""
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    version = importlib.metadata.version

    def no_version(name):
        if name == "torch_xla":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", no_version)


@pytest.mark.parametrize("asked", [{"device": "xla"}, {"env": {"PJRT_DEVICE": "TPU"}}])
def test_a_missing_package_names_the_command(absent, asked):
    with raises_code("FX800", "'fxtrain[xla]'"):
        fx.detect(**({"env": {}} | asked))


def test_a_plan_for_it_names_the_command_too(absent):
    with (
        fx.detect({}, device="cpu") as ctx,
        raises_code("FX800", "Plan"),
    ):
        fx.wrap(torch.nn.Linear(1, 1), ctx, fx.Plan(strategy=fx.XLA()))


def test_a_package_for_another_torch_names_both_versions(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.9.0")
    with raises_code("FX800", "torch==1.9.0", "torch_xla==1.9.0"):
        xla_runtime.import_xla()


def test_the_device_or_the_variable_asks_for_it():
    assert xla_runtime.wants_xla("xla:0", {}) and xla_runtime.wants_xla(
        None, {"PJRT_DEVICE": "CPU"}
    )
    assert not xla_runtime.wants_xla("cpu", {"PJRT_DEVICE": "CPU"}) and not xla_runtime.wants_xla(
        None, {}
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, "has 2 processes, but this process found a world size of 1.*TPU_WORKER_HOSTNAMES"),
        (2, "is one of 2 and drives 4 XLA devices.*start one process for each device"),
    ],
)
def test_hosts_of_a_pod_that_drive_several_devices_each_are_told_what_to_do(
    monkeypatch, ranks, words
):
    host = SimpleNamespace(
        set_device_type=lambda kind: None,
        addressable_runtime_device_count=lambda: 4,
        process_count=lambda: 2,
    )
    monkeypatch.setattr(xla_runtime, "import_xla", lambda *_, **__: host)
    with pytest.raises(ContextError, match=words):
        xla_runtime.start_runtime(None, {"PJRT_DEVICE": "TPU"}, Topology(world_size=ranks))


def test_strategies_of_torch_are_refused_there():
    ctx = fx.DistContext(device=torch.device("xla", 0))
    assert "Plan(strategy=fx.XLA())" in xla_problems(ctx, "DDP")[0]
    assert xla_problems(fx.DistContext(), "DDP") == ()


def test_compilations_are_told_when_they_are_late_and_ever_less_often(monkeypatch):
    total = [0]
    monkeypatch.setattr(xla_runtime, "compilations", lambda: total[0])
    watch = RecompilationLog(quiet_steps=3)
    for step in range(1, 41):
        watch.begin()
        total[0] += step <= 2 or step > 10
        with pytest.warns(UserWarning) if _told(step) else contextlib.nullcontext():
            watch.end()
        total[0] += 1  # an evaluation between steps is not counted
    assert (watch.steps, watch.compiled) == (40, 32)


def _told(step):
    compiled = step - 8  # two at first, then every one after the tenth
    return step > 10 and (compiled <= 4 or compiled & (compiled - 1) == 0)


def test_batches_are_moved_ahead_in_order_by_another_thread(monkeypatch):
    moved, threads = [], set()

    def send(data, ctx):
        threads.add(threading.current_thread().name)
        moved.append(data)
        return -data

    monkeypatch.setattr(xla_runtime, "to_xla", send)
    ctx, plan = fx.DistContext(device=torch.device("xla", 0)), fx.Plan(data=fx.Data(prefetch=2))
    read = []

    def pairs():
        for step in range(6):
            read.append(step)
            yield step, (step,)

    found = to_device.on_device(pairs(), ctx, plan, ahead=True)
    assert next(found) == (0, (0,)) and read == [0, 1, 2]
    assert [*found] == [(step, (-step,)) for step in range(1, 6)]
    assert moved == [*range(6)] and threading.current_thread().name not in threads
    read.clear()
    found = to_device.on_device(pairs(), ctx, plan, ahead=False)
    assert next(found) == (0, (0,)) and read == [0]
