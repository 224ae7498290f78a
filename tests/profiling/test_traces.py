"""Traces of torch's profiler: times of communication and kernels, damage."""

import gzip
import json

import pytest
import torch

import fxtrain as fx
from fxtrain.profiling import StepTimes, Summary, summary


def test_traces_of_torch_itself_are_read(tmp_path):
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=cpu, schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1)
    ) as profiler:
        for _ in range(3):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    file = tmp_path / "t.json"
    profiler.export_chrome_trace(str(file))
    (one,) = summary(file).ranks
    assert len(one.steps) == 2
    assert one.total.forward_ns > 0
    assert summary(file).slowest is None


def _event(name, begin, end, kind="cpu_op", thread=1, **args):
    return {
        "ph": "X", "cat": kind, "name": name, "tid": thread, "pid": 1,
        "ts": begin, "dur": end - begin, "args": args,
    }  # fmt: skip


def _summary_of(tmp_path, *events) -> Summary:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"traceEvents": events}))
    return summary(file)


def test_communication_is_exposed_or_hidden(tmp_path):
    (one,) = _summary_of(
        tmp_path,
        _event("ProfilerStep#0", 0, 100, "user_annotation"),
        _event("autograd::engine::evaluate_function: AddmmBackward0", 10, 60),
        _event("aten::mm", 10, 30),
        _event("gloo:all_reduce", 20, 50, "user_annotation", thread=2),
        _event("Optimizer.step#SGD.step", 70, 90, "user_annotation"),
    ).ranks
    assert one.total == StepTimes(
        step_ns=100_000,
        data_ns=0,
        forward_ns=0,
        backward_ns=30_000,  # the operator, and the rest of its node after the collective
        communication_ns=20_000,
        hidden_ns=10_000,
        optimizer_ns=20_000,
        idle_ns=30_000,
    )


def test_a_device_is_measured_by_its_kernels(tmp_path):
    (one,) = _summary_of(
        tmp_path,
        _event("ProfilerStep#0", 0, 100, "user_annotation"),
        _event("enumerate(DataLoader)#x", 0, 10, "user_annotation"),
        _event("autograd::engine::evaluate_function: AddmmBackward0", 20, 30),
        _event("cudaLaunchKernel", 21, 22, "cuda_runtime", correlation=7),
        _event("aten::mm", 12, 19),
        _event("cudaLaunchKernel", 13, 14, "cuda_runtime", correlation=8),
        _event("Memcpy HtoD (Pinned -> Device)", 8, 15, "gpu_memcpy", thread=70),
        _event("gemm", 15, 35, "kernel", thread=70, correlation=8),
        _event("gemm", 40, 60, "kernel", thread=70, correlation=7),
        _event("ncclDevKernel_AllReduce", 50, 80, "kernel", thread=71),
    ).ranks
    assert one.total == StepTimes(
        step_ns=100_000,
        data_ns=15_000,
        forward_ns=20_000,
        backward_ns=20_000,
        communication_ns=20_000,
        hidden_ns=10_000,
        optimizer_ns=0,
        idle_ns=25_000,
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a complete Chrome trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "not a complete Chrome trace"),
        (b"[]", "not a complete Chrome trace"),
        (b'{"a": 1}', "contains no traceEvents"),
        (b'{"traceEvents": []}', "contains no traceEvents"),
        (b'{"traceEvents": [{"ph": "M"}]}', "contains no steps"),
        (b'{"traceEvents": [3]}', "damaged: an event is not an object"),
        (b'{"traceEvents": [{"ph": "X", "dur": 1, "ts": "now"}]}', "is damaged"),
        (b'{"traceEvents": [], "fxtrain": 3}', "contains no traceEvents"),
    ],
)
def test_a_damaged_trace_is_an_error(tmp_path, content, words):
    file = tmp_path / "t.json"
    file.write_bytes(content)
    with pytest.raises(fx.PlanError, match=words):
        summary(file)


def test_a_folder_without_traces_is_an_error(tmp_path):
    for path, words in ((tmp_path, "contains no traces"), (tmp_path / "no.json", "cannot read")):
        with pytest.raises(fx.PlanError, match=words):
            summary(path)
