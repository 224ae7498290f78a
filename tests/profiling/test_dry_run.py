"""Dry runs in this process: figures, problems, and what is left behind."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.ops.collectives import PIECE_BYTES
from fxtrain.state import Traffic
from fxtrain.testing import fake_world
from tests._errors import raises_code
from tests.profiling import _dry_runs
from tests.profiling._dry_runs import DRY_DDP, dry_linear, train_linear
from tests.profiling._loops import by_steps

pytestmark = DRY_DDP


def test_figures_of_an_endless_loop():
    run = dry_linear(world=1024)
    size = 100 * 100 * 4
    assert (run.memory.parameters, run.memory.gradients) == (size, size)
    assert run.memory.optimizer == 2 * size + 4  # two moments, and the number of updates
    assert run.step == (
        Traffic(kind="all_reduce", axis="replicate", ranks=1024, count=1, bytes=size),
    )
    assert run.peak == max(moment.total for moment in run.timeline) <= run.memory.total
    assert run.problems == () and run.fits
    assert run.plan == fx.Plan() and run.mesh == fx.Mesh(replicate=1024)


def test_a_model_larger_than_this_machine_takes_no_memory():
    run = dry_linear(
        width=2_000_000, device_memory="80GB", plan=fx.Plan(strategy=fx.Single()), world=1
    )
    assert run.memory.parameters == 16 * 10**12
    (problem,) = run.problems
    assert problem.kind == "memory" and problem.fatal and not run.fits
    assert "96.0 TB, but the device has 80.0 GB" in problem.text


def test_a_run_that_fits_only_later_says_so():
    def build(ctx):
        whole = torch.zeros(10_000)  # before it is cut to this rank's part
        part = nn.Parameter(whole[:10].clone())
        del whole
        optimizer = torch.optim.SGD([part])
        while True:
            part.sum().backward()
            optimizer.step()

    run = fx.dry_run(build, world=2, device_memory=20_000)
    (problem,) = run.problems
    assert run.fits and problem.kind == "memory" and "40.0 kB" in problem.text


def test_wrapping_sends_values_without_a_second_copy_of_the_model():
    def build(ctx):
        plan = fx.Plan(strategy=fx.DDP(), local=fx.LocalSGD(every=2))
        frozen = [nn.Linear(8192, 8192, bias=False).requires_grad_(False) for _ in range(16)]
        net = nn.Sequential(*frozen, nn.Linear(8192, 1))
        sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        fns = fx.StepFns(
            fx.wrap(net, ctx, plan, optimizer=sgd), lambda model, b: model(b.data).mean()
        )
        while True:
            fx.step(ctx, fx.batch(torch.ones(1, 8192), ctx, plan), fns)

    run = fx.dry_run(build, world=2)
    # What a broadcast sends, and what it returns, of one piece at a time.
    assert run.setup_peak <= 16 * 8192 * 8192 * 4 + 2.1 * PIECE_BYTES


def test_a_refused_plan_is_a_problem():
    run = dry_linear(plan=fx.Plan(strategy=fx.Single()))
    (problem,) = run.problems
    assert problem.kind == "plan" and problem.fatal
    assert "Single() trains on one rank" in problem.text
    assert _dry_runs.__file__ in problem.where
    assert (run.updates, run.step) == (0, ())


def test_a_look_at_a_value_is_told_with_its_line():
    seen = []

    def look(model, report):
        seen.append(report.loss.item())
        seen.append(f"{report.loss:.2f}")

    run = dry_linear(after=look)
    assert {problem.kind for problem in run.problems} == {"value"} and run.fits
    assert len({problem.where for problem in run.problems}) == 2
    assert all(problem.where.startswith(__file__) for problem in run.problems)
    assert set(seen) == {0.0, "0.00"}


def test_finite_numbers_are_assumed():
    answers = []

    def look(model, report):
        loss = report.loss
        answers.append(
            (
                bool(torch.isfinite(loss)),
                bool(torch.isfinite(loss).all()),
                bool((~torch.isfinite(loss)).any()),
                bool(torch.isnan(loss)),
                bool(torch.isinf(loss)),
                loss.tolist(),
            )
        )

    dry_linear(after=look)
    assert set(answers) == {(True, True, False, False, False, 0.0)}


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        (lambda weight: weight.nonzero(), "value", "shape that depends on values"),
        (lambda weight: weight[weight > 0], "value", "shape that depends on values"),
        (lambda weight: weight.detach().numpy(), "value", "reads values"),
    ],
    ids=["nonzero", "mask", "numpy"],
)
def test_what_needs_values_ends_the_run_with_its_line(line, kind, says):
    run = dry_linear(after=lambda model, _: line(model.module.weight))
    (problem, *_) = run.problems
    assert (problem.kind, problem.fatal) == (kind, True)
    assert says in problem.text and problem.where.startswith(__file__)
    assert run.updates == 1 and run.memory.parameters == 40_000


def test_an_operator_without_a_rule_for_shapes():
    with torch.library._scoped_library("fxtrain_test", "FRAGMENT") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", torch.clone, "CPU")
        run = dry_linear(after=lambda model, _: torch.ops.fxtrain_test.mystery(model.module.weight))
    assert run.problems[0].kind == "unsupported"
    assert "register_fake" in run.problems[0].text


def test_whole_numbers_keep_their_values():
    found = []

    def loop(ctx):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
        marks = torch.tensor([1, 0, 1, 1]).bool()
        rows = torch.rand(4, 3)
        found.extend([sorted(order.tolist()), int(marks.sum()), rows[marks].shape])
        found.append(torch.nn.functional.one_hot(torch.tensor([2, 0])).tolist())
        found.append(type(torch.ones(10**6, dtype=torch.int64) * 10**6).__name__)
        found.append(type(torch.ones(10**8, dtype=torch.int64)).__name__)
        by_steps(ctx, fx.Plan())

    fx.dry_run(loop, world=2)
    assert found == [list(range(10)), 3, (3, 3), [[0, 0, 1], [1, 0, 0]], "Tensor", "FakeTensor"]


def test_programming_errors_are_not_findings():
    def wrong(ctx):
        return {}["missing"]

    with pytest.raises(KeyError):
        fx.dry_run(wrong, world=2)
    assert not dist.is_initialized()


def test_workers_are_not_started():
    assert dry_linear(workers=2).memory == dry_linear().memory


def test_compiled_models_run_as_they_are():
    compiled = dry_linear(plan=fx.Plan(compile=fx.Compile(backend="eager")))
    assert compiled.memory.parameters == dry_linear().memory.parameters
    assert compiled.step == dry_linear().step and compiled.problems == ()


def test_modules_move_and_change_their_dtype():
    def loop(ctx):
        net = nn.Linear(10, 10).to("cpu").to(torch.bfloat16)
        optimizer = torch.optim.SGD(net.parameters())
        while True:
            net(torch.ones(1, 10, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()

    assert fx.dry_run(loop, world=2).memory.parameters == 220


def test_a_loop_that_ends_early_is_told():
    def once(ctx):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight])
        weight.sum().backward()
        optimizer.step()

    (problem,) = fx.dry_run(once, world=2).problems
    assert problem.kind == "steps" and not problem.fatal


def test_a_function_that_never_trains_is_an_error():
    with raises_code("FX500", "idle"):

        def idle(ctx):
            return ctx.world_size

        fx.dry_run(idle, world=2)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"world": 0}, fx.PlanError, "world=0"),
        ({"world": True}, fx.PlanError, "world=True"),
        ({"world": 4, "rank": 4}, fx.PlanError, "a rank from 0 to 3"),
        ({"world": 6, "mesh": fx.Mesh(shard=4)}, fx.errors.ContextError, "this run has 6"),
        ({"world": 2, "device_memory": "80 liters"}, fx.PlanError, "80GB"),
        ({"world": 2, "device_memory": -1}, fx.PlanError, "device_memory=-1"),
    ],
)
def test_impossible_worlds_are_refused(changes, error, says):
    with pytest.raises(error, match=says):
        fx.dry_run(train_linear, **changes)
    assert not dist.is_initialized()


def test_a_rank_of_a_real_group_cannot_pretend():
    with fake_world(2), raises_code("FX100"):
        fx.dry_run(train_linear, world=4)


def test_torch_is_left_as_it_was():
    owners = {DataLoader: "__iter__", torch.utils: "swap_tensors", torch.Tensor: "__format__"}
    before = [getattr(owner, name) for owner, name in owners.items()]
    before.append(torch.UntypedStorage.resize_)
    dry_linear(plan=fx.Plan(strategy=fx.Single()))  # ends with an error
    dry_linear()
    after = [getattr(owner, name) for owner, name in owners.items()]
    assert [*after, torch.UntypedStorage.resize_] == before
    assert not dist.is_initialized()
    assert type(torch.ones(2)) is torch.Tensor
