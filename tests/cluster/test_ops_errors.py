"""Collectives that ranks call differently, or that one of them never joins."""

import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain import CollectiveError, ops
from tests._errors import raises_code
from tests.cluster._timeouts import with_timeout


def _numbers(ctx):
    return ops.reduce({"n": ctx.rank + 1, "x": 0.5, "same": "s"}, ctx, op="sum")


def _wrong_shape(ctx):
    return ops.gather({"x": torch.ones(2 + ctx.rank)}, ctx)


def _wrong_dtype(ctx):
    return ops.reduce(torch.ones(2, dtype=torch.int32 if ctx.rank else torch.float32), ctx)


def _wrong_structure(ctx):
    return ops.gather([torch.ones(2)] if ctx.rank else (torch.ones(2),), ctx)


def _wrong_order(ctx):
    return ops.barrier(ctx) if ctx.rank else ops.gather(torch.ones(2), ctx)


def _wrong_large(ctx):
    return ops.gather(torch.ones(5000 + ctx.rank), ctx)


def _wrong_op(ctx):
    return ops.reduce(torch.ones(2), ctx, op="sum" if ctx.rank else "max")


def _wrong_value(ctx):
    return ops.agree(ctx.rank, ctx, name="seed")


WRONG = {
    _wrong_shape: ("gather", "float32[2]", "float32[3]"),
    _wrong_dtype: ("reduce", "float32[2]", "int32[2]"),
    _wrong_structure: ("gather", "tuple(0: *)", "list(0: *)"),
    _wrong_order: ("different collectives", "gather(", "barrier("),
    _wrong_large: ("gather", "float32[5000]", "float32[5001]"),
    _wrong_op: ("reduce", "max", "sum"),
    _wrong_value: ("agree", "seed=0", "seed=1"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda fn: fn.__name__.strip("_"))
def test_a_mismatch_is_an_error_on_every_rank_and_the_group_survives(cluster, wrong):
    if cluster.n == 1:
        return
    errors = cluster.outcomes(wrong)
    for error in errors:
        assert isinstance(error, CollectiveError) and "timed out" not in str(error)
        for words in (*WRONG[wrong], "rank 0:", "test_ops_errors.py:"):
            assert words in str(error)
    assert len({str(error) for error in errors}) == 1
    assert cluster.run(_numbers)[0]["n"] == cluster.n * (cluster.n + 1) // 2


def _layout(ctx, kind):
    if kind == "DTensor":
        plan = fx.Plan(strategy=fx.FSDP())
        return next(fx.wrap(nn.Linear(2, 2), ctx, plan).parameters()).norm()
    if kind == "sparse_coo":
        return torch.eye(2).to_sparse()
    parts = [torch.ones(2), torch.ones(3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def _gather_layout(ctx, kind):
    return ops.gather({"x": _layout(ctx, kind)}, ctx)


@pytest.mark.parametrize(
    ("kind", "cure"),
    [("DTensor", "full_tensor()"), ("sparse_coo", "to_dense()"), ("nested", "to_padded_tensor(")],
)
def test_tensors_that_are_not_one_block_of_values_are_refused(pair, kind, cure):
    for error in pair.outcomes(_gather_layout, kind):
        assert isinstance(error, CollectiveError)
        assert kind in str(error) and cure in str(error)
    assert pair.run(_numbers)[0]["n"] == 3


def _clips_alone(ctx):
    model = fx.wrap(nn.Linear(2, 2), ctx, fx.Plan(strategy=fx.FSDP()))
    ops.backward(model(torch.ones(1, 2)).sum(), model)
    if ctx.rank:
        ops.clip_norm(model, 1.0)
    ops.barrier(ctx)


@pytest.mark.slow  # waits for the timeout of torch's group
def test_a_rank_that_never_joins_a_part_of_a_step_is_named(pair):
    error = str(pair.outcomes(_clips_alone)[1])
    assert re.search(r"clip_norm\(\) at .*test_ops_errors.py:\d+ did not complete", error)
    assert re.search(r"rank 0: waited [\d.]+ s in barrier at .*test_ops_errors.py:\d+\n", error)


def _saves_alone(ctx, path):
    model = fx.wrap(nn.Linear(1, 1), ctx, fx.Plan())
    return ops.barrier(ctx) if ctx.rank else fx.save(path, ctx, model)


def test_a_mismatch_inside_a_public_function_names_that_function(pair, tmp_path):
    for error in pair.outcomes(_saves_alone, str(tmp_path)):
        named = r"rank 0: save at .*test_ops_errors.py:\d+, which calls gather_objects\(dst=0\)\n"
        assert re.search(named + r"  rank 1: barrier\(\) at .*test_ops_errors.py:\d+\n", str(error))


@contextmanager
def _first_without_rank_1(ctx, folder):
    """A block that rank 1 enters when rank 0 has given up waiting for it there."""
    left = Path(folder, "left")
    while ctx.rank == 1 and not left.exists():
        time.sleep(0.02)
    try:
        yield
    finally:
        left.touch()


def _one_saves_late(ctx, folder):
    model = fx.wrap(nn.Linear(1, 1), ctx, fx.Plan())
    with _first_without_rank_1(ctx, folder):
        fx.save(f"{folder}/run", with_timeout(ctx), model)


@pytest.mark.slow
def test_a_rank_that_never_joins_a_save_is_named_with_it(pair, tmp_path):
    first = str(pair.outcomes(_one_saves_late, str(tmp_path))[0])
    assert re.search(r"save at .*test_ops_errors.py:\d+, which calls \w+\(.*\), did not", first)
    assert "rank 1: never joined this save (timed out" in first


def _one_is_late(ctx, folder):
    short = fx.detect({}, device="cpu", timeout_s=0.5 * ctx.comm.timeout_s)
    with _first_without_rank_1(ctx, folder):
        ops.barrier(short)


@pytest.mark.slow  # waits for half of the pool's timeout
def test_a_rank_that_never_comes_is_named_within_the_timeout(pair, tmp_path):
    errors = pair.outcomes(_one_is_late, str(tmp_path))
    assert all(isinstance(error, CollectiveError) for error in errors)
    assert "rank 1: never joined this" in str(errors[0])
    assert "barrier" in str(errors[0]) and "test_ops_errors.py:" in str(errors[0])
    waited = re.search(r"rank 0: waited ([\d.]+) s", str(errors[1]))
    assert 0.4 * pair.timeout_s < float(waited[1]) < pair.timeout_s
    assert pair.run(_numbers)[0]["n"] == 3


def _unpicklable(ctx):
    return ops.gather_objects((lambda: 0) if ctx.rank else 0, ctx)


def test_an_object_that_does_not_pickle_is_an_error_everywhere(pair):
    for error in pair.outcomes(_unpicklable):
        assert isinstance(error, CollectiveError)
        assert "rank 1 passed a value that cannot be sent" in str(error)


def _main_first(ctx, fail):
    seen = []
    with ops.main_first(ctx):
        seen.append(time.monotonic())
        if ctx.is_main:
            time.sleep(0.2)
            if fail:
                raise OSError("disk full")
            seen.append(time.monotonic())
    return seen


def test_main_first_runs_main_first(cluster):
    results = cluster.run(_main_first, False)
    for others in results[1:]:
        assert others[0] >= results[0][1]


def test_main_first_releases_the_others_with_its_error(pair):
    first, second = pair.outcomes(_main_first, True)
    assert isinstance(first, OSError)
    assert isinstance(second, CollectiveError)
    assert "disk full" in str(second)


def _problem(ctx, error, who, src=None, action=""):
    with ops.fail_together(ctx, action, src=src):
        if ctx.rank in who:
            raise error


def test_an_error_of_another_package_is_raised_on_its_rank_and_quoted_on_others(pair):
    first, second = pair.outcomes(_problem, ValueError("mine"), [1])
    assert isinstance(first, CollectiveError) and "rank 1: ValueError: mine" in str(first)
    assert isinstance(second, ValueError)


def test_an_error_of_fxtrain_is_the_same_on_every_rank_and_names_the_one_that_failed(pair):
    for error in pair.outcomes(_problem, fx.errors.DataError("Row 7 is empty."), [1]):
        assert type(error) is fx.errors.DataError
        assert str(error) == "rank 1: Row 7 is empty. [FX400]"


@pytest.mark.parametrize(("who", "src"), [([0], 0), ([0, 1], None)], ids=["for all", "alike"])
def test_ranks_that_fail_alike_have_one_message(pair, who, src):
    errors = pair.outcomes(_problem, fx.errors.DataError("Row 7 is empty."), who, src)
    assert {(type(error), error.message) for error in errors} == {
        (fx.errors.DataError, "Row 7 is empty.")
    }


def _differently(ctx):
    with ops.fail_together(ctx):
        raise (fx.PlanError if ctx.rank else fx.errors.DataError)(f"Problem {ctx.rank}.")


def test_ranks_that_fail_differently_have_the_errors_of_all(pair):
    errors = pair.outcomes(_differently)
    assert {type(error) for error in errors} == {fx.errors.DataError}
    (message,) = {error.message for error in errors}
    assert "rank 0: Problem 0." in message and "rank 1: Problem 1." in message


def test_an_error_of_the_operating_system_is_one_of_the_action(cluster):
    full = OSError(28, "No space left on device")
    for error in cluster.outcomes(_problem, full, [0], 0, "save to x"):
        assert isinstance(error, fx.CheckpointError)
        assert error.message == "save to x: No space left on device."


def _values(ctx, src):
    counts = ctx.rank + 1 if ctx.rank != 1 else None
    with ops.fail_together(ctx, src=src) as together:
        together.value = counts
    return together.values


def test_a_block_gives_its_value_to_every_rank(cluster):
    every = [None if rank == 1 else rank + 1 for rank in range(cluster.n)]
    assert cluster.run(_values, None) == [every] * cluster.n
    assert cluster.run(_values, 0) == [[1] * cluster.n] * cluster.n


def _nested(ctx, caught):
    """Ranks whose calls differ inside a block, after which another one may fail."""
    with ops.fail_together(ctx), ops.fail_together(ctx):
        try:
            ops.agree(ctx.rank, ctx)
        except CollectiveError:
            if not caught:
                raise
            with ops.fail_together(ctx):
                if ctx.rank:
                    raise ValueError("mine") from None
    return ops.reduce(1, ctx, op="sum")


@pytest.mark.parametrize("caught", [False, True])
def test_blocks_nest(pair, caught):
    first, second = pair.outcomes(_nested, caught)
    assert isinstance(first, CollectiveError)
    assert isinstance(second, ValueError if caught else CollectiveError)
    assert pair.run(_numbers)[0]["n"] == 3


def _lagged(ctx, shape):
    from fxtrain.ops.transport import exchange

    call = ("gather", f"float32{shape[ctx.rank]}")
    exchange.compare_calls(ctx, ("gather", "a"), wait=True)
    exchange.compare_calls(ctx, ("gather", "b"), wait=True)
    exchange.compare_calls(
        ctx, ("gather", "ab"[ctx.rank] if shape[0] != shape[1] else "a"), wait=False
    )
    ops.barrier(ctx)
    return call


def test_a_lagged_check_is_settled_by_the_next_call(pair):
    assert pair.run(_lagged, [[2], [2]])
    for error in pair.outcomes(_lagged, [[2], [3]]):
        assert isinstance(error, CollectiveError)
        assert "gather(a)" in str(error) and "gather(b)" in str(error)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.gather({"x": 1}, None),
        lambda: ops.reduce(1, {"x": 1}),
        lambda: ops.pad(1, "ctx"),
        lambda: ops.any_rank(True, 1),
        lambda: ops.barrier(None),
        lambda: ops.say("text", None),
    ],
)
def test_what_is_no_context_is_refused(call):
    with raises_code("FX100", "order of the arguments"):
        call()


def _code_of_rank_1(ctx, error):
    with pytest.raises(fx.FxError) as caught:
        _problem(ctx, error, [1])
    return type(caught.value), caught.value.message, str(caught.value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (fx.CheckpointError("x was changed.", code="FX602"), "FX602"),
        (fx.errors.DataError("Row 7 is empty."), "FX400"),
        (fx.CollectiveError("Another rank failed: [FX400]"), "FX400"),
    ],
    ids=["precise", "class", "quoted"],
)
def test_the_code_of_one_rank_is_that_of_all(pair, error, code):
    (_, heard, told), (kind, raised, own) = pair.run(_code_of_rank_1, error)
    assert kind is type(error) and raised in heard
    assert own == f"{raised} [{code}]" and told == f"{heard} [{code}]"
