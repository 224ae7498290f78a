"""The largest batch size that fits: agreed by all ranks, and nothing is left of a try."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.tuning import is_out_of_memory
from tests._errors import raises_code
from tests.cluster._timeouts import with_timeout
from tests.profiling._dry_runs import DRY_DDP


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Leave everything else out of the collections of garbage after every try."""
    gc.collect()
    gc.freeze()


def _found(ctx, start, limits, accumulate, shrink):
    tried = []

    def trial(size, plan):
        tried.append((size, plan.accumulate))
        if size > limits[ctx.rank]:
            raise MemoryError

    plan = fx.Plan(accumulate=accumulate)
    try:
        size, scaled = fx.tuning.find_batch_size(ctx, trial, start, plan, shrink=shrink)
        return size, scaled.accumulate, tried
    except fx.PlanError as error:
        return str(error), None, tried


@pytest.mark.parametrize("limits", [(100, 5), (3, 3), (0, 100)])
@pytest.mark.parametrize("shrink", [0.5, 0.9])
def test_ranks_agree_on_the_smallest(pair, limits, shrink):
    found = pair.run(_found, 24, limits, 2, shrink)
    assert found[0] == found[1]
    size, accumulate, tried = found[0]
    if min(limits) == 0:
        assert "no batch size from 24 down to 1" in size
    else:
        assert size <= min(limits) and size * accumulate == 48
        assert all(one > min(limits) for one, _ in tried[:-1])
    assert all(one * times == 48 for one, times in tried)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(1, 6),
    st.sampled_from([0.5, 0.9]),
)
def test_the_rows_of_an_update_stay(start, limit, accumulate, shrink):
    ctx = fx.DistContext()
    size, scaled, tried = _found(ctx, start, (limit,), accumulate, shrink)
    assert size * scaled == start * accumulate
    assert size <= min(start, limit)
    sizes = [one for one, _ in tried]
    assert sizes == sorted(set(sizes), reverse=True)


def _other_error(ctx):
    def trial(size, plan):
        if ctx.is_last:
            raise KeyError("mine")

    try:
        fx.tuning.find_batch_size(ctx, trial, 4)
    except (KeyError, fx.CollectiveError) as error:
        return type(error).__name__, str(error)


def test_another_error_is_raised_on_all_ranks(pair):
    (kind, text), (own, _) = pair.run(_other_error)
    assert own == "KeyError"
    assert kind == "CollectiveError" and "rank 1: KeyError" in text


def test_nothing_is_left_of_a_try():
    held = []

    class Big:
        pass

    def trial(size, plan):
        assert not [one for one in held if one() is not None]
        big = Big()
        big.itself = big  # only the garbage collector finds it
        held.append(weakref.ref(big))
        return size < 3 or torch.empty(1 << 60) is None

    gc.disable()
    try:
        assert fx.tuning.find_batch_size(fx.DistContext(), trial, 8)[0] == 2
    finally:
        gc.enable()
    assert len(held) == 3


def test_a_trial_that_answers_no_does_not_fit():
    def trial(size, plan):
        return size * 4000 <= 20_000

    size, plan = fx.tuning.find_batch_size(fx.DistContext(), trial, 16)
    assert (size, plan.accumulate) == (4, 4)


def _predicted(memory, train=None, **how):
    rows = torch.ones(4000, 1000)

    def default(ctx, size, plan):
        net = torch.nn.Linear(1000, 1)
        model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        for batch in fx.shard(DataLoader(rows, batch_size=size), ctx, plan):
            fx.step(ctx, batch, fns)

    return fx.tuning.predict_batch_size(train or default, 64, world=4, device_memory=memory, **how)


@DRY_DDP
@pytest.mark.slow
def test_dry_runs_predict_what_fits():
    sizes = [_predicted(memory)[0] for memory in ("150kB", "250kB", "1GB")]
    assert sizes == [8, 16, 64]
    size, plan = _predicted("250kB", plan=fx.Plan(accumulate=2))
    assert size * plan.accumulate == 128 and size < 64


@DRY_DDP
@pytest.mark.slow
def test_nothing_that_fits_is_an_error():
    with raises_code("FX200", "64 down to 1"):
        _predicted(1000, shrink=0.1)


def test_a_dry_run_that_ends_otherwise_is_an_error():
    def train(ctx, size, plan):
        raise fx.PlanError("not this one")

    with raises_code("FX200", "batch size 64", "not this one"):
        _predicted("1GB", train)


def _run_out(_):
    raise MemoryError


def _one_rank_runs_out(ctx, where):
    """One rank has no memory left before a collective of the trial; the other waits in it.

    For longer than the pool waits for an answer.
    """
    ctx = with_timeout(ctx, 600)

    def trial(size, plan):
        net = torch.nn.Linear(4, 4)
        model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))

        def loss(model, batch):
            out = model(batch.data)
            if size > 2 and ctx.is_last:
                out.register_hook(_run_out)
            return out.square().mean()

        if where == "step":
            fx.step(ctx, fx.batch(torch.ones(2, 4), ctx, plan), fx.StepFns(model, loss))
            return
        if size > 2 and ctx.is_last:
            raise MemoryError
        fx.ops.reduce(torch.ones(3, 5, 7), ctx, op="sum")  # a call that no test made before

    size, plan = fx.tuning.find_batch_size(ctx, trial, 8, fx.Plan(strategy=fx.DDP()))
    return size, plan.accumulate, fx.ops.reduce(1, ctx, op="sum")


@pytest.mark.parametrize("where", ["step", "call"])
def test_ranks_go_on_if_one_runs_out_before_a_collective(pair, where):
    assert pair.run(_one_rank_runs_out, where) == [(2, 4, 2)] * 2


ERRORS = {
    "cpu": RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB"),
    "npu": RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"),
    "xpu": RuntimeError("Native API failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if"),
    "python": MemoryError(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_every_device_are_recognized(name):
    assert is_out_of_memory(ERRORS[name])
    outer = RuntimeError("while training")
    outer.__cause__ = ERRORS[name]
    assert is_out_of_memory(outer)


def test_the_allocator_of_this_torch_is_recognized():
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60)
    assert is_out_of_memory(found.value)
    assert not is_out_of_memory(ValueError("CUDA out of memory"))


def test_the_last_error_is_the_cause_if_nothing_fits():
    def trial(size, plan):
        raise RuntimeError(f"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. {size}")

    with raises_code("FX200", "8 down to 1") as error:
        fx.tuning.find_batch_size(fx.DistContext(), trial, 8)
    assert str(error.value.__cause__).endswith("SUPPORTED. 1")


def test_a_function_that_takes_something_else_is_named_before_it_is_called():
    with raises_code("FX200", "trial(size, plan)"):
        fx.tuning.find_batch_size(fx.DistContext(), lambda n: 1 / 0, 8)
    with raises_code("FX200", "train(ctx, size, plan)"):
        fx.tuning.predict_batch_size(lambda size, plan: 1 / 0, 8, world=2, device_memory="1GB")
    assert fx.tuning.find_batch_size(fx.DistContext(), lambda n, *rest: None, 8)[0] == 8


@pytest.mark.parametrize("how", [{"start": 0}, {"start": "8"}, {"start": 8, "shrink": 1.0}])
def test_wrong_arguments_are_named(how):
    with raises_code("FX200", "find_batch_size"):
        fx.tuning.find_batch_size(fx.DistContext(), print, **how)
