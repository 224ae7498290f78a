"""`fx.profile` on one process: cycles, times, FLOPs, and everything that it refuses."""

import gzip
import json
import time

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx
from fxtrain.profiling import summary
from tests._errors import raises_code
from tests._slow import slow_after
from tests.profiling._dry_runs import OLD_TORCH

ROWS, SIZE = 4, 8
NAP_S = 0.02


class _Rows(Dataset):
    def __len__(self):
        return 10 * ROWS

    def __getitem__(self, index):
        return torch.full((SIZE,), index / 40)


class _SlowRows(_Rows):
    def __getitem__(self, index):
        time.sleep(NAP_S / ROWS)
        return super().__getitem__(index)


class _SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(NAP_S)
        return super().step(closure)


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(NAP_S)
        return grad


def _train(ctx, plan, *, rows=_Rows, sgd=torch.optim.SGD, loss=None, what=None):
    """Ten steps; their trace, and the weight after them."""
    torch.manual_seed(0)
    net = nn.Linear(SIZE, SIZE, bias=False)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: sgd(params, lr=0.1))
    fns = fx.StepFns(model=model, loss=loss or (lambda model, x: model(x.data).square().mean()))
    loader = fx.shard(DataLoader(rows(), batch_size=ROWS), ctx, plan)
    with fx.profile(ctx, what or plan) as trace:
        for batch in loader:
            fx.step(ctx, batch, fns)
            trace.step()
    return trace, net.weight.detach().clone()


def _spec(tmp_path, **changes):
    return fx.Profile(folder=str(tmp_path / "p"), **changes)


def _steps(trace):
    return [step for one in trace.summary.ranks for step in one.steps]


def _sum(step):
    return (
        step.data_ns
        + step.forward_ns
        + step.backward_ns
        + step.communication_ns
        + step.optimizer_ns
        + step.idle_ns
    )


def test_a_profile_has_exactly_its_cycles(ctx, tmp_path):
    spec = _spec(tmp_path, skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    trace, _ = _train(ctx, fx.Plan(profile=spec))
    names = [f"cycle-00{cycle}/rank-00000.json.gz" for cycle in (0, 1)]
    assert [file.relative_to(spec.folder).as_posix() for file in trace.files] == names
    found = [one for one in (tmp_path / "p").rglob("*") if one.is_file()]
    assert sorted(found) == [*trace.files, tmp_path / "p" / "summary.json"]
    assert len(_steps(trace)) == 4
    assert summary(spec.folder) == trace.summary
    for step in _steps(trace):
        assert _sum(step) == step.step_ns
        assert min(step.data_ns, step.forward_ns, step.backward_ns, step.optimizer_ns) > 0
        assert step.communication_ns == step.hidden_ns == 0


@pytest.mark.filterwarnings("ignore:with_modules is deprecated")  # from torch 2.15 on
def test_parameters_are_equal_with_and_without(ctx, tmp_path):
    spec = _spec(tmp_path, shapes=True, memory=True, stacks=True, flops=True, modules=True)
    _, plain = _train(ctx, fx.Plan())
    state = torch.get_rng_state()
    trace, profiled = _train(ctx, fx.Plan(profile=spec))
    assert torch.equal(plain, profiled)
    assert torch.equal(state, torch.get_rng_state())
    events = json.loads(gzip.decompress(trace.files[0].read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "python_function" for event in events)
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert any(event.get("name") == "[memory]" for event in events)


def test_flops_are_those_of_a_linear_model(ctx, tmp_path):
    spec = _spec(tmp_path, active=3, flops=True)
    trace, _ = _train(
        ctx,
        fx.Plan(profile=spec),
        loss=lambda model, x: model(x.data).mean(),  # no product beyond the model's
    )
    product = 2 * ROWS * SIZE * SIZE
    forward_and_weight_gradient = 2 * product
    (one,) = trace.summary.ranks
    extra = one.flops - 3 * forward_and_weight_gradient
    assert 0 <= extra <= 3 * 10 * SIZE * SIZE  # additions and multiplications of SGD and the mean


@pytest.mark.parametrize(
    ("part", "how"),
    slow_after(
        2,
        [
            ("data", {"rows": _SlowRows}),
            ("optimizer", {"sgd": _SlowSGD}),
            ("backward", {"loss": lambda model, x: _SlowBackward.apply(model(x.data)).mean()}),
            ("idle", {"loss": lambda model, x: (time.sleep(NAP_S), model(x.data).mean())[1]}),
        ],
    ),
)
def test_time_is_counted_where_it_is_spent(ctx, tmp_path, part, how):
    trace, _ = _train(ctx, fx.Plan(), what=_spec(tmp_path), **how)
    for step in _steps(trace):
        assert getattr(step, f"{part}_ns") >= NAP_S * 0.9e9
        assert _sum(step) == step.step_ns


def test_a_plan_without_a_profile_records_nothing(ctx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace, _ = _train(ctx, fx.Plan())
    assert (trace.count, trace.files, trace.summary) == (10, (), None)
    assert list(tmp_path.iterdir()) == []


def test_a_short_loop_keeps_what_it_recorded(ctx, tmp_path):
    with fx.profile(ctx, _spec(tmp_path, wait=0, warmup=0, active=5)) as trace:
        for _ in range(2):
            trace.step()
    assert len(_steps(trace)) == 2


@pytest.mark.parametrize("steps", [0, 1])
def test_a_loop_that_ends_in_the_warm_up_leaves_no_profiler(ctx, tmp_path, steps, caplog):
    with fx.profile(ctx, _spec(tmp_path, wait=0, warmup=2)) as trace:
        for _ in range(steps):
            trace.step()
    assert trace.summary is None
    assert f"Nothing was recorded in {steps} steps" in caplog.text
    assert not torch._C._autograd._profiler_enabled()


def test_an_error_in_the_loop_ends_the_profiler(ctx, tmp_path):
    with pytest.raises(ZeroDivisionError), fx.profile(ctx, _spec(tmp_path, wait=0, warmup=0)):
        raise ZeroDivisionError
    assert not torch._C._autograd._profiler_enabled()
    with fx.profile(ctx, _spec(tmp_path, wait=0, warmup=0, active=1)) as trace:
        trace.step()
    assert len(_steps(trace)) == 1


def test_a_nested_profiler_is_refused(ctx, tmp_path):
    cpu = [torch.profiler.ProfilerActivity.CPU]
    running = raises_code("FX500", "torch")
    with torch.profiler.profile(activities=cpu), running:
        fx.profile(ctx, _spec(tmp_path)).__enter__()


@pytest.mark.skipif(
    OLD_TORCH,
    reason="torch 2.9 raises an error of its own",
)
def test_a_nested_profiler_ends_the_outer_one(ctx, tmp_path, caplog):
    cpu = [torch.profiler.ProfilerActivity.CPU]
    outer = fx.Profile(folder=str(tmp_path / "outer"), wait=0, warmup=0, active=1)
    with fx.profile(ctx, outer) as trace:
        with torch.profiler.profile(activities=cpu):
            pass
        trace.step()
    assert trace.summary is None
    assert "another profiler of torch has ended this one" in caplog.text
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"activities": ("cdua",)}, r"choose a list or tuple, each one of 'cpu', 'cuda'"),
        ({"active": 0}, "of at least 1"),
        ({"ranks": ()}, "None for all"),
        ({"ranks": (0, 0)}, "different ranks"),
        ({"folder": " "}, "printable"),
        ({"wait": -1}, "of at least 0"),
    ],
)
def test_a_wrong_value_is_an_error(how, words):
    with pytest.raises(fx.PlanError, match=words):
        fx.Profile(**how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"activities": ("mtia",)}, "torch cannot record mtia on this machine; it can record"),
        ({"ranks": (0, 3)}, "no rank 3. This context has ranks 0 to 0"),
        ({"folder": "/proc/nothing"}, "/proc/nothing.*Choose another folder"),
    ],
)
def test_what_cannot_be_recorded_is_an_error(ctx, tmp_path, how, words):
    with pytest.raises(fx.PlanError, match=words):
        fx.profile(ctx, attrs.evolve(_spec(tmp_path), **how)).__enter__()


def test_traces_of_an_earlier_profile_are_kept(ctx, tmp_path):
    spec = _spec(tmp_path, wait=0, warmup=0, active=1)
    with fx.profile(ctx, spec) as trace:
        trace.step()
    with raises_code("FX200", str(spec.folder)):
        fx.profile(ctx, spec).__enter__()
    assert summary(spec.folder) == trace.summary


def test_a_trace_that_cannot_be_written_does_not_stop_training(ctx, tmp_path, caplog):
    spec = _spec(tmp_path, wait=0, warmup=0, active=1, repeat=2)
    with fx.profile(ctx, spec) as trace:
        (tmp_path / "p" / "cycle-000").write_text("in the way")
        trace.step()
        trace.step()
    assert "cannot write this file" in caplog.text
    assert [file.parent.name for file in trace.files] == ["cycle-001"]
    assert len(_steps(trace)) == 2  # known, though the trace of one was not written


ROWS_AVERAGES, SIZE_AVERAGES = 4, 8


def _train_averages(ctx, spec):
    net = nn.Linear(SIZE_AVERAGES, SIZE_AVERAGES, bias=False)
    with fx.profile(ctx, spec) as trace:
        for _ in range(10):
            net(torch.ones(ROWS_AVERAGES, SIZE_AVERAGES)).square().mean().backward()
            trace.step()
    return trace


def test_averages_are_those_of_torch(ctx, tmp_path):
    spec = _spec(tmp_path, active=2, shapes=True, memory=True, flops=True)
    trace = _train_averages(ctx, spec)
    averages = {one.key: one for one in trace.key_averages()}
    # Forward, and the gradient of the weight; and as many again for the square's.
    assert averages["aten::mm"].count == 2 * 2
    assert averages["aten::mm"].flops == 2 * 2 * (2 * ROWS_AVERAGES * SIZE_AVERAGES * SIZE_AVERAGES)
    assert averages["aten::mul"].self_cpu_memory_usage > 0
    shapes = [one.input_shapes for one in trace.key_averages(group_by_input_shape=True)]
    assert [[ROWS_AVERAGES, SIZE_AVERAGES], [SIZE_AVERAGES, SIZE_AVERAGES]] in shapes
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
    trace = _train_averages(ctx, _spec(tmp_path, active=None))
    assert trace.count == 10 and len(trace.summary.ranks[0].steps) == 10
