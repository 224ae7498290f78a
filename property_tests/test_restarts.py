"""A run cut anywhere and started again any number of times equals the run left alone."""

import tempfile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.trackers import read_run

LOOPS = st.fixed_dictionaries(
    {
        "accumulate": st.integers(1, 3),
        "shuffle": st.booleans(),
        "flush": st.booleans(),
        "rows": st.integers(3, 9),
    }
)
LENGTHS = st.one_of(
    st.fixed_dictionaries({"epochs": st.integers(1, 5)}),
    st.fixed_dictionaries({"updates": st.integers(1, 9)}),
    st.fixed_dictionaries({"updates": st.integers(1, 9), "epochs": st.integers(1, 5)}),
    st.fixed_dictionaries({"rows": st.integers(1, 30)}),
    st.fixed_dictionaries({"tokens": st.integers(1, 60)}),
)
WAYS = st.sampled_from(["raises", "breaks", "stops"])


def _run(folder, loop, length, cut, way=None):
    """One start of a script: its batches, weights and rate; cut after so many steps."""
    with fx.detect(env={}, device="cpu") as ctx:
        plan = fx.Plan(accumulate=loop["accumulate"], flush=loop["flush"], seed=3)
        torch.manual_seed(0)
        model = fx.wrap(
            torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Dropout(0.2)),
            ctx,
            plan,
            optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        )

        def loss(model, batch):
            total = model(batch.data).square().sum()
            return fx.Weighted(total, 2 * len(batch.data))

        rows = torch.arange(loop["rows"], dtype=torch.float32)[:, None]
        loader = fx.shard(DataLoader(rows, batch_size=2, shuffle=loop["shuffle"]), ctx, plan)
        fns = fx.StepFns(model=model, loss=loss)
        steps = []
        try:
            how = {"show": False, "log_every": 2, "save_every": 2, **length}
            with fx.fit(ctx, fns, loader, folder, **how) as reports:
                for report in reports:
                    steps.append((report.position, float(report.loss)))
                    if len(steps) == cut:
                        if way == "raises":
                            raise KeyError("in the body")
                        if way == "breaks":
                            break
                        reports.stop()
        except KeyError:
            pass
        return steps, {name: value.tolist() for name, value in fx.weights(model)}


@settings(max_examples=6, deadline=None)
@given(
    loop=LOOPS,
    length=LENGTHS,
    cuts=st.lists(st.tuples(st.integers(1, 6), WAYS), max_size=6),
)
def test_a_run_in_any_number_of_parts_is_the_run_left_alone(loop, length, cuts):
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        wanted, weights = _run(whole, loop, length, None)
        seen = {}
        for cut, way in [*cuts, (None, None)]:
            steps, found = _run(parts, loop, length, cut, way)
            seen |= dict(steps)
        assert found == weights
        assert set(seen.items()) <= set(wanted)
        curves = [read_run(folder) for folder in (whole, parts)]
        assert curves[0].curve("loss") == curves[1].curve("loss")
        assert curves[0].curve("lr") == curves[1].curve("lr")
        again, found = _run(parts, loop, length, None)
        assert (again, found) == ([], weights)
