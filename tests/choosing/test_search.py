"""What a search finds, with dry runs that are arithmetic."""

import json

import attrs
import pytest
from rich.console import Console

import fxtrain as fx
from fxtrain.choosing.trials import dry_runs
from fxtrain.state import Problem
from tests._errors import raises_code
from tests.choosing._programs import DEVICE, arithmetic, question, searched


def _with(**memory):
    return attrs.evolve(DEVICE, **memory)


def _reasons(choice):
    return " ".join(text for text, _ in choice.dropped)


def test_the_fastest_plan_that_fits_is_first():
    choice = searched()
    seconds = [row.cost.seconds for row in choice.table]
    assert seconds == sorted(seconds) and len(seconds) > 3
    assert all(row.memory <= 0.9 * DEVICE.memory for row in choice.table)
    assert choice.best.batch_size == 8 and choice.plan.accumulate == 1
    assert choice.plan == choice.table[0].plan and choice.advice == ""


def test_a_batch_that_does_not_fit_is_split_or_recomputed():
    # 16 MB of states, and 1 MB for each of 8 rows, or a quarter of that.
    choice = searched(device=_with(memory=22_500_000), asked=question(fixed={"strategy"}))
    found = {(row.batch_size, row.plan.accumulate, row.plan.recompute) for row in choice.table}
    assert found >= {(4, 2, ()), (8, 1, ("Block",))}
    assert all(row.rows == 64 for row in choice.table)
    assert "a step does not fit" in _reasons(choice)


def test_long_updates_follow_from_short_dry_runs():
    seen = []

    def program(attempt, world, rank, look):
        seen.append(attempt[0].accumulate)
        return arithmetic(attempt, world, rank, look)

    asked = question(rows=8 * 64, plan=fx.Plan(accumulate=64), fixed={"strategy", "accumulate"})
    choice = searched(asked, program=program)
    assert max(seen) == 2 and choice.plan.accumulate == 64
    one = searched(question(rows=8, fixed={"strategy"}), program=program)
    assert choice.best.cost.compute_s == pytest.approx(64 * one.best.cost.compute_s)


def test_fields_that_are_fixed_stay():
    plan = fx.Plan(strategy=fx.FSDP(), mesh=fx.Mesh(replicate=2, shard=4), precision="bf16")
    asked = question(plan=plan, fixed={"strategy", "mesh", "precision"})
    choice = searched(asked)
    assert {(row.plan.strategy, row.plan.mesh) for row in choice.table} == {
        (plan.strategy, plan.mesh)
    }
    assert choice.plan.precision == plan.precision


def test_plans_that_wrap_refuses_are_grouped():
    choice = searched(question(world=6, rows=12))
    counts = dict(choice.dropped)
    (text,) = [text for text in counts if text.startswith("TP: Net has no tensor-parallel plan")]
    assert counts[text] >= 1


def test_parameters_that_do_not_fit_need_no_dry_run():
    asked = question(plan=fx.Plan(), fixed={"strategy"})
    choice = searched(asked, device=_with(memory=10_000_000))
    assert choice.tried == 0 and choice.table == ()
    assert "16.0 MB on each rank" in choice.advice and "16 ranks" in choice.advice
    with raises_code("FX200"):
        choice.plan


def test_where_nothing_fits_the_smallest_change_is_named():
    asked = question(fixed={"strategy", "recompute", "accumulate"})
    choice = searched(asked, device=_with(memory=20_000_000))
    assert choice.table == () and choice.tried == 1
    assert "needs 24.0 MB of each rank, and 18.0 MB can be used" in choice.advice
    assert "Use a device with 26.7 MB (T4)" in choice.advice


def test_other_devices_are_compared():
    choice = searched(device=_with(memory=60_000_000))
    found = dict(choice.sensitivity)
    assert found["with 30.0 MB"].cost.seconds >= choice.best.cost.seconds
    assert found["with 120 MB"].cost.seconds <= choice.best.cost.seconds
    assert found["on links half as fast"].cost.seconds >= choice.best.cost.seconds


def test_a_program_with_its_own_plan_keeps_it():
    def own(attempt, world, rank, look):
        run = arithmetic(attempt, world, rank, look)
        return attrs.evolve(run, plan=attrs.evolve(run.plan, strategy=fx.DDP()))

    choice = searched(program=own)
    assert [row.plan.strategy for row in choice.table] == [fx.DDP()]
    assert "passes another plan to fx.wrap" in _reasons(choice)


def test_data_that_ends_is_a_reason():
    def short(attempt, world, rank, look):
        run = arithmetic(attempt, world, rank, look)
        return attrs.evolve(run, updates=1) if world > 1 else run

    choice = searched(program=short)
    assert choice.table == () and "fewer rows or updates than asked" in choice.advice


def test_an_error_of_the_program_under_some_plan_is_a_reason():
    def failing(attempt, world, rank, look):
        if isinstance(attempt[0].strategy, fx.FSDP):
            raise KeyError("mine")
        return arithmetic(attempt, world, rank, look)

    choice = searched(program=failing)
    assert isinstance(choice.plan.strategy, fx.DDP) and "KeyError: 'mine'" in _reasons(choice)


def test_a_program_that_does_not_run_at_all_is_an_error():
    def refused(attempt, world, rank, look):
        problem = Problem(kind="plan", text="PlanError: no", fatal=True)
        return attrs.evolve(arithmetic(attempt, world, rank, look), problems=(problem,))

    with raises_code("FX200", "one rank", "PlanError: no"):
        searched(program=refused)

    def broken(attempt, world, rank, look):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        searched(program=broken)


def test_a_model_that_is_not_wrapped_is_an_error():
    def plain(attempt, world, rank, look):
        return arithmetic(attempt, world, rank, lambda model: None)

    with raises_code("FX200", "fx.wrap", "fx.step"):
        searched(program=plain)


def test_a_search_ends_with_what_it_has():
    choice = searched(device=_with(memory=20_000_000), most=2)
    assert choice.tried == 2
    assert "not tried within 10 minutes and 2 dry runs" in _reasons(choice)


def test_a_choice_is_shown_drawn_and_plain_data():
    pytest.importorskip("matplotlib")
    choice = searched(device=_with(memory=25_000_000))
    console = Console(width=120)
    with console.capture() as shown:
        console.print(choice)
    text = shown.get()
    for words in ("64 rows of an update on 8 x H100", "limited by", "compute (", "dropped because"):
        assert words in text
    data = json.loads(json.dumps(choice.data()))
    assert data["plans"][0]["seconds"] == choice.best.cost.seconds
    assert data["sensitivity"][0]["with"] == "with 12.5 MB"
    assert len(choice.plot().axes[0].get_yticks()) == len(choice.table)


def test_answers_are_kept_until_a_file_changes(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("one")
    calls = []
    attempt = (fx.Plan(mesh=fx.Mesh(replicate=8)), 4)

    def answer():
        return dry_runs(_Counted((str(script),)), attempt, 8, None, str(tmp_path / "kept"))

    _Counted.calls = calls
    first = answer()
    assert answer() == first and len(calls) == 1
    script.write_text("two")
    assert answer() == first and len(calls) == 2


def test_answers_are_kept_by_the_rows_of_an_update(tmp_path):
    def update(rows):
        program, attempt = _Counted(()), (fx.Plan(), 2)
        answer = dry_runs(program, attempt, 1, question(rows=rows), str(tmp_path))
        return answer["about"]["update"]

    _Counted.calls = []
    assert [update(rows) for rows in (64, 32, None, 64)] == [64, 32, 16, 64]
    assert len(_Counted.calls) == 3


class _Counted:
    """A program with words, which can be sent to another process."""

    calls = ()

    def __init__(self, args):
        self.args = args

    def __call__(self, *args):
        self.calls.append(args)
        return arithmetic(*args)
