"""The entries that `fit` writes: what they contain, and what they count across a restart."""

import functools
import time
from collections import Counter
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.curves import read_curves
from fxtrain.loop import fit_entries, fitting
from fxtrain.trackers import read_run


def _made(ctx, rows=8):
    torch.manual_seed(0)
    model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    return fns, fx.shard(DataLoader(torch.ones(rows, 1), batch_size=2), ctx)


def _entries(folder):
    return [entry["values"] for entry in read_run(folder).entries]


def test_an_entry_has_what_a_report_shows(ctx, tmp_path):
    fns, loader = _made(ctx, 40)
    list(fx.fit(ctx, fns, loader, tmp_path, epochs=1, show=False))
    for values in _entries(tmp_path):
        assert set(values) >= {
            *("loss", "skipped", "lr", "rows_per_s", "waiting", "memory_gib", "memory_peak_gib"),
            *("time/forward_ms", "time/backward_ms", "time/optimizer_ms"),
        }
        assert values["skipped"] == 0 and 0 <= values["waiting"] < 1
        assert 0 < values["memory_gib"] <= values["memory_peak_gib"]


def test_tokens_are_counted_where_they_weigh_the_loss(ctx, tmp_path):
    fns, loader = _made(ctx, 8)
    for name, weight in (("rows", 2), ("number", 10), ("tensor", torch.tensor(10))):
        given = fx.StepFns(
            model=fns.model,
            loss=lambda m, b, w=weight: fx.Weighted(m(b.data).square().mean() * w, w),
        )
        list(fx.fit(ctx, given, loader, tmp_path / name, epochs=1, log_every=2, show=False))
        for values in _entries(tmp_path / name):
            speeds = values["rows_per_s"], values.get("tokens_per_s")
            assert (
                speeds[1] is None if name == "rows" else speeds[1] == pytest.approx(5 * speeds[0])
            )


def test_mfu_is_the_counted_operations_over_the_peak_of_the_device(ctx, tmp_path, monkeypatch):
    """Of a device with a known peak, which a CPU has not; longer batches count as more."""
    rows, sizes = [torch.ones(length, 4) for length in (2, 2, 6, 6)], []

    def loss(model, batch):
        sizes.append(batch.data.numel())
        return model(batch.data).square().mean()

    def fit(folder, plan):
        model = fx.wrap(torch.nn.Linear(4, 4), ctx, plan, optimizer=torch.optim.SGD)
        loader = fx.shard(DataLoader(rows, batch_size=1), ctx, plan)
        fns = fx.StepFns(model=model, loss=loss)
        list(fx.fit(ctx, fns, loader, folder, epochs=1, log_every=4, show=False))
        return _entries(folder)[-1]

    assert "mfu" not in fit(tmp_path / "unknown", fx.Plan())
    asked = []
    monkeypatch.setattr(
        "fxtrain.meters.peak_flops",
        lambda ctx, precision: asked.append(precision) or 1e9,
    )
    values = fit(tmp_path / "known", fx.Plan())
    flops = sum(2 * 2 * 4 * 4 * (size // 4) for size in sizes[-4:])  # forward, weight's gradient
    # Four rows took this time.
    assert values["mfu"] == pytest.approx(flops * values["rows_per_s"] / 4 / 1e9)
    fit(tmp_path / "half", fx.Plan(precision="bf16"))
    assert asked == ["fp32", "bf16"]
    assert "mfu" not in fit(tmp_path / "compiled", fx.Plan(compile=fx.Compile(backend="eager")))


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_time_is_counted_in_its_phase(ctx, tmp_path, phase):
    nap_s = 0.05

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(nap_s if phase == "optimizer" else 0)
            return super().step(closure)

    def loss(model, batch):
        time.sleep(nap_s if phase == "forward" else 0)
        out = model(batch.data)
        if phase == "backward":
            out.register_hook(lambda _: time.sleep(nap_s))
        return out.mean()

    model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=lambda params: Slow(params, lr=0.1))
    loader = fx.shard(DataLoader(torch.ones(2, 1), batch_size=1), ctx)
    fns = fx.StepFns(model=model, loss=loss)
    list(fx.fit(ctx, fns, loader, tmp_path, epochs=1, log_every=1, show=False))
    for values in _entries(tmp_path):
        assert values[f"time/{phase}_ms"] >= 900 * nap_s


def test_the_learning_rate_is_that_of_the_update(ctx, tmp_path):
    for rate in (0.5, torch.tensor(0.5)):
        model = fx.wrap(
            torch.nn.Linear(1, 1),
            ctx,
            optimizer=lambda p, rate=rate: torch.optim.Adam(p, lr=rate, capturable=False),
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        )
        fns, loader = _made(ctx)
        fns = fx.StepFns(model=model, loss=fns.loss)
        folder = tmp_path / type(rate).__name__
        list(fx.fit(ctx, fns, loader, folder, epochs=1, log_every=1, show=False))
        assert read_run(folder).curve("lr") == [(n, 0.5**n) for n in (1, 2, 3, 4)]


LENGTHS = {"epochs": (1, 2), "updates": (4, 7), "rows": (8, 14), "tokens": (40, 70)}


@pytest.mark.parametrize("measure", LENGTHS)
def test_the_last_entry_has_what_the_others_have(ctx, tmp_path, measure):
    """Also that of a run which is continued, whatever ends it."""

    def run(folder, length):
        model = fx.wrap(
            torch.nn.Linear(1, 1),
            ctx,
            optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
            scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
        )
        fns = fx.StepFns(model, lambda m, b: fx.Weighted(m(b.data).sum(), torch.tensor(10.0)))
        loader = fx.shard(DataLoader(torch.ones(8, 1), batch_size=2), ctx)
        list(fx.fit(ctx, fns, loader, folder, **{measure: length}, show=False, log_every=3))
        return read_run(folder).curve("lr"), [set(values) for values in _entries(folder)]

    stop, end = LENGTHS[measure]
    run(tmp_path / "parts", stop)
    for folder in ("whole", "parts"):
        rates, names = run(tmp_path / folder, end)
        assert rates == [(n, 1 / n) for n, _ in rates] and len(rates) == len(names)
        assert rates[-1][0] == (8 if measure == "epochs" else 7)
        always = {"loss", "lr", "rows_per_s", "time/forward_ms", "time/optimizer_ms"}
        assert all(always <= one for one in names)


def test_speeds_are_by_the_clock_without_evaluation_and_saving(
    ctx, tmp_path, monkeypatch, clock_of
):
    """By a clock that moves in no other place than these, each by a power of two."""
    costs = {"data": 1, "step": 2, "body": 4, "evaluate": 8, "save": 16}
    spent, written, saved = Counter(), [], fitting.save  # `written`: what was spent by an entry
    clock = SimpleNamespace(monotonic=spent.total, perf_counter=time.perf_counter)
    clock_of(fit_entries, fitting, clock=clock)

    def pay(part):
        spent[part] += costs[part]
        return 1.0

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            pay("data")
            return torch.ones(1)

    def loss(model, batch):
        pay("step")
        return model(batch.data).square().mean()

    monkeypatch.setattr(fitting, "save", lambda *one, **more: pay("save") and saved(*one, **more))
    fns = attrs.evolve(_made(ctx)[0], loss=loss)
    loader = fx.shard(DataLoader(Rows(), batch_size=2), ctx)
    how = {"log_every": 2, "evaluate_every": 3, "save_every": 2, "show": False}
    evaluate = functools.partial(pay, "evaluate")
    for report in fx.fit(ctx, fns, loader, tmp_path, epochs=1, evaluate=evaluate, **how):
        if report.updates % 2 == 0:
            written.append(spent.copy())
        pay("body")
    entries = [values for values in _entries(tmp_path) if "loss" in values]
    assert len(written) == len(entries) == 4
    before = written[0]  # the run began by another clock
    for now, values in zip(written[1:], entries[1:], strict=True):
        since = now - before
        seconds = sum(since[part] for part in ("data", "step", "body"))
        assert values["rows_per_s"] == 4 / seconds
        assert values["waiting"] == since["data"] / seconds
        for part in ("evaluate", "save"):
            assert values.get(f"{part}_s", 0) == since[part]
        before = now
    assert all((before - written[0])[part] for part in costs)


def test_skipped_updates_are_counted_across_a_restart(ctx, tmp_path):
    plan = fx.Plan(nonfinite="skip")

    def run(stop):
        net = torch.nn.Linear(1, 1)
        model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        rows = torch.ones(10, 1)
        rows[[1, 3, 7]] = torch.nan
        loader = fx.shard(DataLoader(rows, batch_size=1), ctx, plan)
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        for report in fx.fit(ctx, fns, loader, tmp_path, epochs=1, log_every=5, show=False):
            if report.position.updates == stop:
                break

    run(3)
    run(None)
    assert [values["skipped"] for values in _entries(tmp_path)] == [2, 1]


def _profiled(ctx, folder, epochs, fails_at=9):
    spec = fx.Profile(folder=str(folder / "profile"), wait=0, warmup=1, active=2)
    plan = fx.Plan(profile=spec)
    net = torch.nn.Linear(1, 1)
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    loader = fx.shard(DataLoader(torch.ones(5, 1), batch_size=1), ctx, plan)

    def loss(model, batch):
        assert batch.position.index < fails_at
        return model(batch.data).mean()

    fns = fx.StepFns(model=model, loss=loss)
    return len(list(fx.fit(ctx, fns, loader, folder / "run", epochs=epochs, show=False)))


def test_the_profile_of_the_plan_is_recorded_once(ctx, tmp_path):
    assert (_profiled(ctx, tmp_path, 1), _profiled(ctx, tmp_path, 2)) == (5, 5)
    summary = fx.profiling.summary(tmp_path / "profile")
    assert len(summary.ranks[0].steps) == 2
    table = read_curves([tmp_path / "run"])[0].tables["ms per step by phase"]
    assert list(table["columns"]) == list(summary.columns)
    assert table["rows"] == [[one for (one,) in summary.columns.values()]]


def test_a_run_that_failed_before_its_first_checkpoint_is_not_profiled_again(ctx, tmp_path):
    with pytest.raises(AssertionError):
        _profiled(ctx, tmp_path, 1, fails_at=5)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["cycle-000"]
    assert _profiled(ctx, tmp_path, 1) == 5
