"""Events of torch's profiler as times of steps, and the file with these times."""

import gzip
import json
import os

import pytest
import torch

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.profiling import RankTimes, StepTimes, Summary, summary
from fxtrain.profiling.step_times import Event, step_times
from fxtrain.state import write_record
from tests._errors import raises_code


def _op(name, begin, end, **how):
    return Event(name, begin * 1000, end * 1000, **how)


def _range(name, begin, end):
    return _op(name, begin, end, is_range=True)


def test_communication_is_exposed_or_hidden():
    (step,) = step_times(
        [
            _range("ProfilerStep#0", 0, 100),
            _op("autograd::engine::evaluate_function: AddmmBackward0", 10, 60),
            _op("aten::mm", 10, 30),
            _op("gloo:all_reduce", 20, 50, thread=2),
            _range("Optimizer.step#SGD.step", 70, 90),
        ]
    )
    assert step == StepTimes(
        step_ns=100_000,
        backward_ns=30_000,  # the operator, and the rest of its node after the collective
        communication_ns=20_000,
        hidden_ns=10_000,
        optimizer_ns=20_000,
        idle_ns=30_000,
    )


def test_a_device_is_measured_by_its_kernels():
    (step,) = step_times(
        [
            _range("ProfilerStep#0", 0, 100),
            _range("enumerate(DataLoader)#x", 0, 10),
            _op("autograd::engine::evaluate_function: AddmmBackward0", 20, 30, id=1),
            _op("aten::mm", 21, 22, id=7),
            _op("aten::mm", 12, 19, id=8),
            _op("Memcpy HtoD (Pinned -> Device)", 8, 15, launcher=0),
            _op("gemm", 15, 35, launcher=8),
            _op("gemm", 40, 60, launcher=7),
            _op("ncclDevKernel_AllReduce", 50, 80, launcher=9),
        ]
    )
    assert step == StepTimes(
        step_ns=100_000,
        data_ns=15_000,
        forward_ns=20_000,
        backward_ns=20_000,
        communication_ns=20_000,
        hidden_ns=10_000,
        idle_ns=25_000,
    )


def test_steps_of_a_device_end_with_the_kernels_that_they_launched():
    """The host has launched the kernels of both steps before the first kernel runs."""
    first, second = step_times(
        [
            _range("ProfilerStep#0", 0, 10),
            _op("aten::mm", 1, 2, id=1),
            _range("Optimizer.step#SGD.step", 5, 9),
            _op("aten::add", 6, 7, id=2),
            _range("ProfilerStep#1", 10, 20),
            _op("aten::mm", 11, 12, id=3),
            _op("aten::mm", 21, 22, id=4),  # of a step that is not recorded
            _op("gemm", 3, 53, launcher=1),
            _op("add", 53, 60, launcher=2),
            _op("gemm", 62, 92, launcher=3),
            _op("gemm", 92, 99, launcher=4),
        ]
    )
    assert first == StepTimes(step_ns=60_000, forward_ns=50_000, optimizer_ns=7_000, idle_ns=3_000)
    assert second == StepTimes(step_ns=32_000, forward_ns=30_000, idle_ns=2_000)


def test_a_moment_between_steps_counts_for_none():
    first, second = step_times(
        [
            _op("aten::mm", 5, 25),
            _range("ProfilerStep#1", 20, 30),
            _range("ProfilerStep#0", 0, 10),
        ]
    )
    assert (
        (first.forward_ns, first.idle_ns) == (second.forward_ns, second.idle_ns) == (5_000, 5_000)
    )


def test_traces_are_whole_and_name_their_rank(tmp_path):
    spec = fx.Profile(folder=str(tmp_path), active=None)
    with fx.detect(env={}, device="cpu") as ctx, fx.profile(ctx, spec) as trace:
        torch.ones(8, 8) @ torch.ones(8, 8)
    events = json.loads(gzip.decompress(trace.files[0].read_bytes()))["traceEvents"]
    assert {"ProfilerStep#0", "aten::mm"} <= {event.get("name") for event in events}


TIMES = Summary(ranks=(RankTimes(rank=0, steps=(StepTimes(step_ns=9, forward_ns=9),)),))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"step_ns": 9', '"step_ns": -9', "of at least 0"),
        ('"step_ns": 9', '"step_ns": 1' + "0" * 400, "a whole number"),
        ('"step_ns": 9', '"step_ns": "\\u001b[2J"', "a whole number"),
        ('"rank": 0', '"rank": {}', "a whole number"),
        ('"ranks"', '"ranky"', "unknown key 'ranky'"),
        ('"flops": null', '"flops": Infinity', "Infinity"),
        ("]", "[", "JSON"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, capsys, old, new, words):
    file = tmp_path / "summary.json"
    write_record(TIMES, file)
    assert summary(tmp_path) == summary(file) == TIMES
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(fx.PlanError, match=words):
        summary(tmp_path)
    assert main(["profile", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "summary.json" in told.err and "\x1b" not in told.err + told.out


def test_a_folder_without_a_profile_says_what_writes_one(tmp_path, capsys):
    assert main(["profile", str(tmp_path)]) == 2
    assert "fx.Plan(profile=fx.Profile(folder=...))" in " ".join(capsys.readouterr().err.split())


def test_a_file_of_another_kind_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "summary.json")
    with raises_code("FX201"):
        summary(tmp_path)
    with raises_code("FX201"):
        summary(tmp_path / "none.json")
