"""The plan of a launch file, in the script."""

import logging
from collections.abc import Callable

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.cli.launch_command import LAUNCH, spec_of
from fxtrain.launchers.program import plan_variable
from tests._errors import raises_code
from tests.launched._run import FXTRAIN, run_fork


@attrs.frozen
class _Own:
    """A strategy config of a third party that holds a function."""

    wrap: Callable = None
    kind: str = "own"


SCRIPT = """
import torch, fxtrain as fx
with fx.detect() as ctx:
    model = fx.wrap(torch.nn.Linear(2, 2), ctx)
    loader = fx.shard(torch.utils.data.DataLoader(torch.ones(4, 2)), ctx)
    own = fx.given_plan(fx.Plan(seed=9, clip_norm=1.0))
    print(own.accumulate, own.seed, model.plan == loader.plan == fx.given_plan(), end="")
"""
VALUES = {"precision": "bf16", "accumulate": 4, "seed": 3}
GIVEN = fx.Plan(**VALUES)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "fxtrain.toml").write_text("[launch]\nranks = 1\n")
    (tmp_path / "more.toml").write_text("[launch]\nranks = 1\n[plan]\naccumulate = 4\n")
    return tmp_path


def _variables(values):
    return dict([plan_variable(values).split("=", 1)])


def _spec(*words):
    return spec_of(LAUNCH.make_context("launch", list(words)).params)


def test_it_travels_in_a_variable(here):
    assert _spec("train.py").env == ()  # nothing sets a plan
    (variable,) = _spec("--config", "more.toml", "train.py").env
    name, _, value = variable.partition("=")
    assert fx.given_plan(env={name: value}) == fx.Plan(accumulate=4)


def test_a_script_without_a_plan_uses_it(here):
    ended = run_fork(*FXTRAIN, "launch", "--config", "more.toml", "train.py", cwd=here)
    assert (ended.code, ended.out) == (0, "4 9 True"), ended.err


def _wrapped(ctx, *plan):
    return fx.wrap(nn.Linear(2, 2), ctx, *plan, optimizer=torch.optim.SGD)


def _sharded(ctx, *plan):
    return fx.shard(DataLoader(torch.ones(4, 2)), ctx, *plan)


@pytest.mark.parametrize("make", [_wrapped, _sharded])
@pytest.mark.parametrize("given", [None, GIVEN], ids=["without", "given"])
def test_it_is_the_default(make, given):
    env = {} if given is None else _variables(VALUES)
    with fx.detect(env=env, device="cpu") as ctx:
        assert ctx.given_plan == given
        assert make(ctx).plan == make(fx.ops.duplicate(ctx)).plan == (given or fx.Plan())
        assert make(ctx.axis("data")).plan == (given or fx.Plan())


@pytest.mark.parametrize("make", [_wrapped, _sharded])
def test_a_script_with_another_plan_is_told_once_which_settings_of_the_launch_it_overrides(
    make, caplog
):
    own, other = attrs.evolve(GIVEN, accumulate=2, clip_norm=1.0), fx.Plan()
    with caplog.at_level(logging.INFO), fx.detect(env=_variables(VALUES), device="cpu") as ctx:
        assert make(ctx, GIVEN).plan == GIVEN
        assert caplog.messages == []
        for _ in range(2):
            assert make(ctx, own).plan == _sharded(ctx, own).plan == own
        (text,) = caplog.messages
        assert "overrides what the launch sets: accumulate is 2 instead of 4. " in text
        assert "fx.given_plan" in text
        assert make(ctx, other).plan == other
        assert len(caplog.messages) == 2
        assert "precision.compute is 'fp32' instead of 'bf16'" in caplog.messages[1]


# What a launch sets, the plan of a script, the plan that `fx.given_plan` makes of both, and which
# fields the script overrides if it passes its own plan all the same.
MERGED = [
    # A value of the launch counts also where it is the default of fx.Plan.
    ({"accumulate": 1, "precision": "fp32"}, fx.Plan(accumulate=4, precision="bf16", seed=3),
     fx.Plan(seed=3), ["precision.compute", "accumulate"]),
    ({"strategy": {"kind": "fsdp"}}, fx.Plan(strategy=fx.FSDP(shard=2), clip_norm=1.0),
     fx.Plan(strategy=fx.FSDP(shard=2), clip_norm=1.0), []),
    ({"strategy": {"kind": "fsdp", "shard": 4}}, fx.Plan(strategy=fx.FSDP(shard=2, offload=True)),
     fx.Plan(strategy=fx.FSDP(shard=4, offload=True)), ["strategy.shard"]),
    ({"strategy": {"kind": "fsdp"}}, fx.Plan(strategy=fx.DDP(bucket_mib=7)),
     fx.Plan(strategy="fsdp"), ["strategy.kind"]),
    ({"compile": {"backend": "eager"}}, fx.Plan(), fx.Plan(compile=fx.Compile(backend="eager")),
     ["compile"]),
    ({"compile": {"backend": "eager"}}, fx.Plan(compile=fx.Compile(blocks=("Block",))),
     fx.Plan(compile=fx.Compile(blocks=("Block",), backend="eager")), ["compile.backend"]),
    ({"clip_norm": None}, fx.Plan(clip_norm=1.0), fx.Plan(), ["clip_norm"]),
    ({"data": {"source": "dispatch"}}, fx.Plan(data=fx.Data(to_device=False)),
     fx.Plan(data=fx.Data(source="dispatch", to_device=False)), ["data.source"]),
    ({}, GIVEN, GIVEN, []),
]  # fmt: skip


@pytest.mark.parametrize(("values", "own", "merged", "overridden"), MERGED)
def test_a_launch_sets_fields_and_leaves_the_others_to_the_script(
    values, own, merged, overridden, caplog
):
    env = _variables(values)
    assert fx.given_plan(own, env=env) == merged
    assert fx.given_plan(merged, env=env) == merged
    with fx.detect(env=env, device="cpu") as ctx, caplog.at_level(logging.INFO):
        loader = DataLoader(torch.ones(4, 2))
        assert fx.shard(loader, ctx, merged).plan == merged
        assert caplog.messages == []
        fx.shard(loader, ctx, own)
        said = [text.partition("sets: ")[2].partition(". To")[0] for text in caplog.messages]
        names = [part.split(" is ")[0] for text in said for part in text.split(", ")]
        assert names == overridden


def test_what_no_file_can_hold_stays_in_the_plan_of_the_script():
    own = fx.Plan(strategy=_Own(wrap=print))
    assert fx.given_plan(own, env=_variables(VALUES)).strategy is own.strategy


def test_values_that_do_not_fit_the_plan_of_the_script_are_an_error_that_names_them():
    own = fx.Plan(compile=fx.Compile(prepack=True))
    with raises_code("FX200", "prepack=True", "backend='eager'"):
        fx.given_plan(own, env=_variables({"compile": {"backend": "eager"}}))


def _told(ctx, given):
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("fxtrain").addHandler(handler)
    try:
        _wrapped(attrs.evolve(ctx, given_plan=given, given_fields=("seed",)), fx.Plan())
    finally:
        logging.getLogger("fxtrain").removeHandler(handler)
    return len(told)


def test_the_main_rank_says_it(pair):
    assert pair.run(_told, GIVEN) == [1, 0]


def _plan_of_rehearsal(ctx):
    model = fx.wrap(nn.Linear(2, 2), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    for batch in fx.shard(DataLoader(torch.ones(99, 2)), ctx):
        fx.step(ctx, batch, fns)


@pytest.mark.slow
def test_a_dry_run_uses_it(monkeypatch):
    ((name, value),) = _variables(VALUES).items()
    monkeypatch.setenv(name, value)
    assert fx.dry_run(_plan_of_rehearsal, world=2).plan == GIVEN
    assert fx.launch(_launched_plan, ranks=1) == [GIVEN]


def _launched_plan():
    with fx.detect(device="cpu") as ctx:
        return _wrapped(ctx).plan


def test_without_one_the_default_counts():
    assert fx.given_plan(env={}) == fx.Plan()
    assert fx.given_plan(fx.Plan(seed=9), env={}) == fx.Plan(seed=9)


@pytest.mark.parametrize("read", [fx.given_plan, fx.detect])
@pytest.mark.parametrize("text", ["", "{", '{"sed": 1}', "3"])
def test_a_variable_that_is_no_plan_is_named(read, text):
    with raises_code("FX200", "FXTRAIN_PLAN"):
        read(env={"FXTRAIN_PLAN": text})
