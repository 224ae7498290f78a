"""Strategies of installed packages, found by entry point."""

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.backends import STRATEGIES, strategies
from fxtrain.state import unsupported


@attrs.frozen(kw_only=True)
class Mine:
    kind: str = attrs.field(default="mine", init=False)
    level: int = 1


ROW = attrs.evolve(STRATEGIES[0], name="Mine", config=Mine, clip_value=unsupported("it", by="Mine"))
WRONG = "not a strategy"
TWICE = attrs.evolve(ROW, config=fx.DDP)


@pytest.fixture
def installed(monkeypatch):
    def install(name):
        class Entry:
            value = f"somewhere:{name}"

            def load(self):
                return {"ROW": ROW, "WRONG": WRONG, "TWICE": TWICE}[self.name]

        Entry.name = name
        for module in ("fxtrain.backends._table", "fxtrain.state._files"):
            monkeypatch.setattr(f"{module}.entry_points", lambda group: [Entry()])

    return install


def test_a_third_party_row_is_found_by_its_config(installed):
    installed("ROW")
    assert strategies()[Mine] is ROW
    plan = fx.Plan(strategy=Mine(level=3))
    with fx.detect({}, device="cpu") as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, plan)
        assert model.strategy is ROW  # though its wrap is Single's own
        with pytest.raises(fx.PlanError, match="Mine does not support it"):
            fx.ops.clip_value(model, 1.0)
    for form in ("json", "toml", "yaml"):
        assert fx.loads(fx.dumps(plan, form), fx.Plan, form) == plan
    assert fx.fingerprint(plan) != fx.fingerprint(fx.Plan())


@pytest.mark.parametrize(("name", "words"), [("WRONG", "found str"), ("TWICE", "second strategy")])
def test_a_wrong_entry_point_is_named(installed, name, words):
    installed(name)
    with pytest.raises(fx.PlanError, match=words):
        strategies()


def test_a_config_that_nobody_carries_out_is_refused():
    with fx.detect({}, device="cpu") as ctx, pytest.raises(fx.PlanError, match=r"DDP, .*Single"):
        fx.wrap(torch.nn.Linear(2, 1), ctx, fx.Plan(strategy=Mine()))
