"""Averages of operators, a function for each trace, and profiles of blocks without steps."""

import attrs
import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.profiling import summary

ROWS, SIZE = 4, 8


def _spec(tmp_path, **changes):
    return fx.Profile(folder=str(tmp_path / "p"), **changes)


def _train(ctx, spec):
    net = nn.Linear(SIZE, SIZE, bias=False)
    with fx.profile(ctx, spec) as trace:
        for _ in range(10):
            net(torch.ones(ROWS, SIZE)).square().mean().backward()
            trace.step()
    return trace


def test_averages_are_those_of_torch(ctx, tmp_path):
    spec = _spec(tmp_path, active=2, shapes=True, memory=True, flops=True)
    trace = _train(ctx, spec)
    averages = {one.key: one for one in trace.key_averages()}
    # Forward, and the gradient of the weight; and as many again for the square's.
    assert averages["aten::mm"].count == 2 * 2
    assert averages["aten::mm"].flops == 2 * 2 * (2 * ROWS * SIZE * SIZE)
    assert averages["aten::mul"].self_cpu_memory_usage > 0
    shapes = [one.input_shapes for one in trace.key_averages(group_by_input_shape=True)]
    assert [[ROWS, SIZE], [SIZE, SIZE]] in shapes
    text = trace.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=3)
    assert "aten::" in text and "FLOPs" in text and "CPU Mem" in text
    with fx.profile(ctx, fx.Plan()) as nothing:
        pass
    assert list(nothing.key_averages()) == [] and nothing.key_averages().table() == ""


def test_a_function_is_called_with_each_trace_that_is_ready(ctx, tmp_path):
    spec, ready = _spec(tmp_path, wait=0, warmup=0, active=2, repeat=2), []

    def on_trace_ready(trace):
        ready.append((trace.count, trace.files[-1].exists(), len(trace.key_averages()) > 0))

    with fx.profile(ctx, spec, on_trace_ready=on_trace_ready) as trace:
        for _ in range(5):
            torch.ones(3).sum()
            trace.step()
    assert ready == [(2, True, True), (4, True, True)]

    def fails(trace):
        raise KeyError("mine")

    spec = attrs.evolve(spec, folder=str(tmp_path / "q"))
    with (
        pytest.raises(KeyError, match="mine"),
        fx.profile(ctx, spec, on_trace_ready=fails) as trace,
    ):
        trace.step()
        trace.step()
        raise AssertionError("the error of the function is lost")


@pytest.mark.parametrize("spec", [{"active": None}, {"wait": 0, "warmup": 0}], ids=["none", "now"])
def test_a_block_without_steps_is_recorded(ctx, tmp_path, spec, caplog):
    spec, ready = _spec(tmp_path, **spec), []
    with fx.profile(ctx, spec, on_trace_ready=lambda trace: ready.append(trace.count)) as trace:
        for _ in range(7):
            torch.ones(8, 8) @ torch.ones(8, 8)
    assert {one.key: one.count for one in trace.key_averages()}["aten::mm"] == 7
    (step,) = trace.summary.ranks[0].steps
    assert step.forward_ns > 0
    assert ready == [0] and len(trace.files) == 1 and not caplog.records
    assert summary(spec.folder) == trace.summary


def test_a_whole_block_has_all_its_steps(ctx, tmp_path):
    trace = _train(ctx, _spec(tmp_path, active=None))
    assert trace.count == 10 and len(trace.summary.ranks[0].steps) == 10
