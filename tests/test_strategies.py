"""Strategies of installed packages, found by entry point."""

import importlib
import types
from typing import get_args

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.backends import built_in, strategies
from fxtrain.backends.wrapping import problems_of
from fxtrain.launchers.config import launch_config
from fxtrain.state import structure, unsupported
from fxtrain.state.plan import StrategyKind
from fxtrain.state.registry import BUILT_IN, kind_of
from fxtrain.testing import LAWS, Cluster, fake_world
from tests._errors import raises_code


@attrs.frozen(kw_only=True)
class Mine:
    kind: str = attrs.field(default="mine", init=False)
    level: int = 1


ROW = attrs.evolve(
    built_in(fx.Single), name="Mine", config=Mine, clip_value=unsupported("it", by="Mine")
)
WRONG = "not a strategy"
TWICE = attrs.evolve(ROW, config=fx.DDP)


def test_every_config_has_a_kind_for_type_checkers_and_a_short_name():
    assert sorted(get_args(StrategyKind)) == sorted(kind_of(config) for config in BUILT_IN)
    assert {config.__name__ for config in BUILT_IN} <= set(fx.__all__)


def test_every_config_has_a_strategy():
    assert {built_in(config).config for config in BUILT_IN} == set(BUILT_IN)


def test_a_third_party_row_is_found_by_its_config(installed):
    installed("[fxtrain.strategies]\nROW = somewhere:ROW", ROW=ROW)
    assert strategies()[Mine] is ROW
    assert fx.Plan(strategy=Mine()) == fx.Plan(strategy=Mine().kind)
    with raises_code("FX200", f"'{Mine().kind}'"):
        fx.Plan(strategy=Mine().kind[:-1])
    plan = fx.Plan(strategy=Mine(level=3))
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, plan)
        assert model.strategy is ROW  # though its wrap is Single's own
        with raises_code("FX202"):
            fx.ops.clip_value(model, 1.0)
    for form in ("json", "toml", "yaml"):
        assert fx.state.loads(fx.state.dumps(plan, form), fx.Plan, form) == plan
    assert fx.fingerprint(plan) != fx.fingerprint(fx.Plan())


def test_a_checkpoint_gives_the_plan_of_an_installed_strategy_back(installed, tmp_path):
    installed("[fxtrain.strategies]\nROW = somewhere:ROW", ROW=ROW)
    plan = fx.Plan(strategy=Mine(level=3))
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, plan)
        fx.save(tmp_path, ctx, model, position=fx.Position())
        assert fx.restore(tmp_path, ctx, model).plan() == plan


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("WRONG", "found str"),
        ("TWICE", "second strategy"),
        ("BROKEN", "BROKEN = gone:BROKEN in .* No module named 'gone'"),
    ],
)
@pytest.mark.parametrize(
    "read",
    [
        strategies,
        lambda: fx.state.loads("{}"),
        lambda: structure({}, fx.Plan),
        lambda: launch_config({}),
        lambda: fx.Plan(strategy="mine"),
        lambda: fx.wrap(torch.nn.Linear(2, 1), fx.detect({}), fx.Plan(strategy=Mine())),
    ],
    ids=["table", "text", "data", "launch file", "kind", "wrap"],
)
def test_a_wrong_entry_point_is_named(installed, name, words, read):
    module = "gone" if name == "BROKEN" else "somewhere"
    entries = f"[fxtrain.strategies]\n{name} = {module}:{name}"
    installed(entries, WRONG=WRONG, TWICE=TWICE)
    with pytest.raises(fx.PlanError, match=words):
        read()


def test_a_package_that_looks_up_its_own_entry_point_is_named_once(
    tmp_path, monkeypatch, installed
):
    """As one does that evolves `strategies()[fx.DDP]` while it is imported."""
    (tmp_path / "circular_package.py").write_text(
        "from fxtrain.backends import strategies\nENTRY = next(iter(strategies().values()))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    installed("[fxtrain.strategies]\nmine = circular_package:ENTRY")
    with raises_code("FX200", "circular_package:ENTRY") as raised:
        strategies()
    assert str(raised.value).count("circular_package:ENTRY") == 1


def test_a_config_that_nobody_carries_out_is_refused():
    with fx.detect({}, device="cpu") as ctx, raises_code("FX200", "DDP"):
        fx.wrap(torch.nn.Linear(2, 1), ctx, fx.Plan(strategy=Mine()))


# What docs/testing.md shows: a row that averages gradients itself. It can be told to forget that.
THEIRS = """
from contextlib import contextmanager
from typing import Literal

import attrs

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends import built_in

SINGLE = built_in(fx.Single)


@attrs.frozen(kw_only=True)
class Mine:
    kind: Literal["mine"] = attrs.field(default="mine", init=False)
    forgets: bool = False


def _check(ctx, plan, module):
    return ()


def _wrap(row, module, ctx, plan, optimizer, scheduler):
    values = ops.broadcast(module.state_dict(), ctx.axis("data"))  # rank 0's count
    module.load_state_dict(values)
    return SINGLE.wrap(row, module, ctx, plan, optimizer, scheduler)


@contextmanager
def _sync(model, micro_batch):
    yield
    if micro_batch.reduces and not model.plan.strategy.forgets:
        trained = [p for p in model.module.parameters() if p.grad is not None]
        means = ops.reduce([p.grad for p in trained], model.ctx.axis("data"), op="mean")
        for parameter, mean in zip(trained, means, strict=True):
            parameter.grad = mean


ROW = attrs.evolve(SINGLE, name="Mine", config=Mine, check=_check, wrap=_wrap, sync=_sync)
"""
META = {
    "METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 0.1\n",
    "entry_points.txt": "[fxtrain.strategies]\nmine = theirs_row:ROW\n",
}


@pytest.mark.slow
def test_the_laws_hold_a_third_partys_row(tmp_path, monkeypatch):
    """As of an installed package, which the ranks of a pool find by themselves."""
    (tmp_path / "theirs_row.py").write_text(THEIRS)
    (tmp_path / "theirs-0.1.dist-info").mkdir()
    for name, text in META.items():
        (tmp_path / "theirs-0.1.dist-info" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    from theirs_row import Mine

    ranks = Cluster(2)
    try:
        for law in LAWS:
            law(ranks, fx.Plan(strategy=Mine()))
        with pytest.raises(AssertionError, match="rank 0 of 2"):
            LAWS[0](ranks, fx.Plan(strategy=Mine(forgets=True)))
    finally:
        ranks.close()


# Of each strategy, an entry under a config of its own with the same fields.
EVOLVED = """
from typing import Literal

import attrs

import fxtrain as fx
from fxtrain.backends import built_in


def _own(config):
    kind = f"own_{config.__name__.lower()}"
    fields = {
        field.name: attrs.field(
            default=field.default,
            converter=field.converter,
            metadata=field.metadata,
            type=field.type,
        )
        for field in attrs.fields(config)
        if field.init
    }
    fields["kind"] = attrs.field(default=kind, init=False, type=Literal[kind])
    name = f"Own{config.__name__}"
    made = attrs.make_class(name, fields, frozen=True, kw_only=True, class_body={
        "__module__": __name__
    })
    return attrs.evolve(built_in(config), name=name, config=made)


SINGLE, DDP, FSDP, PP, OFFLOAD = map(_own, (fx.Single, fx.DDP, fx.FSDP, fx.PP, fx.Offload))
OwnSingle, OwnDDP, OwnFSDP, OwnPP, OwnOffload = (
    entry.config for entry in (SINGLE, DDP, FSDP, PP, OFFLOAD)
)
"""
RESIDENT = fx.state.Placement(units=(fx.state.Unit(name="", device="cpu"),))
# Its fields, the ranks and the mesh on which it is held to the laws.
OWN = {
    "OwnSingle": ({}, 1, None),
    "OwnDDP": ({"bucket_mib": 0.001}, 2, None),
    "OwnFSDP": ({}, 2, None),
    "OwnPP": ({"microbatches": 2}, 2, fx.Mesh(pipeline=2)),
    "OwnOffload": ({"placement": RESIDENT}, 2, None),
}


@pytest.fixture
def evolved(tmp_path, monkeypatch):
    """The module of the evolved entries, in an installed package, and pools that know it."""
    names = ("SINGLE", "DDP", "FSDP", "PP", "OFFLOAD")
    entries = "\n".join(f"{name.lower()} = evolved_entries:{name}" for name in names)
    (tmp_path / "evolved_entries.py").write_text(EVOLVED)
    (tmp_path / "evolved-0.1.dist-info").mkdir()
    for name, text in META.items():
        text = f"[fxtrain.strategies]\n{entries}\n" if name == "entry_points.txt" else text
        (tmp_path / "evolved-0.1.dist-info" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("evolved_entries")


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_an_entry_under_a_config_of_its_own_passes_every_law(evolved, name):
    """So no code outside the entry looks at the type of its config."""
    fields, count, mesh = OWN[name]
    plan = fx.Plan(strategy=getattr(evolved, name)(**fields))
    ranks = Cluster(count)
    try:
        for law in LAWS:
            law(ranks, plan, mesh)
    finally:
        ranks.close()


OWN_PLANS = {
    "local": {"local": fx.LocalSGD(every=2)},
    "verify": {"verify_replicas": 1},
    "context": {"context": fx.CP()},
    "frozen": {"frozen": "digests"},
}


def test_an_entry_under_a_config_of_its_own_has_the_problems_of_its_origin(evolved):
    for own in (evolved.SINGLE, evolved.DDP, evolved.FSDP, evolved.PP, evolved.OFFLOAD):
        config = getattr(fx, own.name.removeprefix("Own"))
        for fields in OWN_PLANS.values():
            found = [
                _refused(attrs.evolve(entry, name="it"), fx.Plan(strategy=entry.config(), **fields))
                for entry in (built_in(config), own)
            ]
            assert found[0] == found[1], (own.name, fields)


def _refused(entry, plan):
    with fake_world(4, mesh=fx.Mesh(shard=2)) as ctx:
        return problems_of(entry, ctx, plan, torch.nn.Linear(2, 1))


def test_every_send_of_a_forward_only_pipeline_has_a_wait(monkeypatch):
    """As torch 2.15 checks when a schedule ends; earlier versions have no such actions."""
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    ours = importlib.import_module("fxtrain.backends.pipeline.schedules")

    def add_waits(actions):
        sends = {
            rank: [one for one in row if "SEND_F" in str(one)] for rank, row in actions.items()
        }
        waits = {rank: [f"WAIT {one}" for one in row] for rank, row in sends.items()}
        return {rank: [*row, *waits[rank]] for rank, row in actions.items()}

    def start(self, stages, n_microbatches):
        self.pp_group_size, self._num_stages = 2, 4

    monkeypatch.setattr(schedules, "_add_wait_send", add_waits, raising=False)
    monkeypatch.setattr(schedules._PipelineScheduleRuntime, "__init__", start)
    owners = {0: 0, 1: 1, 2: 0, 3: 1}
    stages = [types.SimpleNamespace(stage_index_to_group_rank=owners) for _ in range(2)]
    made = ours._ForwardSchedule(stages, 3)
    for rank, row in made.pipeline_order_with_comms.items():
        words = [str(one) for one in row]
        sends = [word for word in words if "SEND_F" in word and "WAIT" not in word]
        assert len(sends) == (6, 3)[rank]
        assert words[-len(sends) :] == [f"WAIT {one}" for one in sends]
