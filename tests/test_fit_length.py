"""How long a run of `fit` is: epochs, updates, rows or tokens, and what a complete run leaves."""

import contextlib
import gc

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.trackers import Tracker, read_run
from tests._errors import raises_code


def _made(ctx, plan=None, *, rows=8, weight=None):
    plan = plan or fx.Plan(seed=3)
    torch.manual_seed(0)
    model = fx.wrap(
        torch.nn.Linear(1, 1),
        ctx,
        plan,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=14),
    )

    def loss(model, batch):
        mean = model(batch.data).square().mean()
        return mean if weight is None else fx.Weighted(mean * weight, weight)

    data = torch.arange(rows, dtype=torch.float32)[:, None] / rows
    loader = fx.shard(DataLoader(data, batch_size=2, shuffle=True), ctx, plan)
    return fx.StepFns(model=model, loss=loss), loader


def _fit(ctx, folder, made=None, **how):
    fns, loader = made or _made(ctx)
    positions = [
        report.position for report in fx.fit(ctx, fns, loader, folder, **{"show": False, **how})
    ]
    return positions, {key: value.tolist() for key, value in fx.weights(fns.model)}


def _files(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


LENGTHS = {
    "updates": ({"updates": 6}, 6, "updates > 6"),
    "updates and more epochs": ({"updates": 6, "epochs": 9}, 6, "updates > 6"),
    "updates and fewer epochs": ({"updates": 6, "epochs": 1}, 4, "epochs > 1"),
    "rows": ({"rows": 11}, 6, "rows > 12"),
    "rows and updates": ({"rows": 11, "updates": 3}, 3, "updates > 3"),
    "epochs": ({"epochs": 3}, 12, "epochs > 3"),
    "nothing": ({"updates": 0}, 0, "updates > 0"),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_run_ends_at_what_comes_first_and_then_changes_nothing(ctx, tmp_path, caplog, name):
    how, end, more = LENGTHS[name]
    folder = tmp_path / "run"
    positions, weights = _fit(ctx, folder, **how)
    assert len(positions) == end
    if end:
        assert [log["step"] for log in read_run(folder).entries] == sorted(
            {*range(4, end, 4), *range(10, end, 10), end}
        )
        assert read_run(folder).curve("loss")[-1][0] == end
    before = _files(tmp_path)
    with caplog.at_level("INFO"):
        assert _fit(ctx, folder, **how) == ([], weights)
    assert f"ended at update {end}. Continue with {more}." in caplog.text
    assert _files(tmp_path) == before


@pytest.mark.parametrize(
    ("limit", "more"),
    [({"updates": 2}, "updates > 6"), ({"rows": 3}, "rows > 12"), ({"epochs": 1}, "epochs > 1")],
)
def test_a_smaller_limit_is_told_what_the_run_has(ctx, tmp_path, caplog, limit, more):
    _fit(ctx, tmp_path / "run", updates=6)
    with caplog.at_level("INFO"):
        assert _fit(ctx, tmp_path / "run", **limit)[0] == []
    assert f"Continue with {more}." in caplog.text


def test_tokens_are_those_of_all_updates_also_before_a_restart(ctx, tmp_path):
    def run(tokens, folder):
        return _fit(ctx, folder, _made(ctx, weight=7), tokens=tokens, log_every=3)

    ends = [run(tokens, tmp_path / "parts")[0][-1].updates for tokens in (7, 8, 35, 36)]
    assert ends == [1, 2, 5, 6]
    assert run(36, tmp_path / "parts")[0] == []
    assert run(36, tmp_path / "whole")[1] == run(36, tmp_path / "parts")[1]


def test_tokens_need_weights(ctx, tmp_path):
    with raises_code("FX200", "rows="):
        _fit(ctx, tmp_path, tokens=100)


def test_a_length_is_required(ctx, tmp_path):
    fns, loader = _made(ctx)
    with raises_code("FX200", "epochs=", "updates=", "rows=", "tokens="):
        fx.fit(ctx, fns, loader, tmp_path)


@pytest.mark.parametrize("flush", [True, False])
def test_the_last_update_closes_its_window(ctx, tmp_path, flush):
    plan = fx.Plan(seed=3, accumulate=3, flush=flush)
    positions, _ = _fit(ctx, tmp_path, _made(ctx, plan), updates=5)
    assert (positions[-1].updates, positions[-1].micro) == (5, 0)
    assert positions[-1].epoch == (2 if flush else 3)


ENDS = {
    (3, True): ([2, 4, 6, 8, 10], ["0004", "0010"]),
    (3, False): ([2, 3, 4, 6, 6], ["0003", "0006.1"]),
    (7, False): ([1, 2, 2], ["0002.1"]),
}


@pytest.mark.parametrize(("accumulate", "flush"), ENDS)
def test_what_an_epoch_ends_with_happens_in_an_open_window_too(ctx, tmp_path, accumulate, flush):
    """At its end, with the next update, or at the end of the run."""
    plan = fx.Plan(accumulate=accumulate, flush=flush)
    fns, loader = _made(ctx, plan)
    scores = iter([5.0, 1.0, 1.0 if accumulate == 7 else 4.0, 3.0, 3.0])
    how = {"epochs": 5, "keep_best": 1, "evaluate": lambda: next(scores), "show": False}
    reports = fx.fit(ctx, fns, loader, tmp_path, **how)
    evaluated = [one.position.updates for one in reports if one.metrics is not None]
    wanted, kept = ENDS[accumulate, flush]
    assert evaluated == wanted
    assert [step for step, _ in read_run(tmp_path).curve("eval")] == wanted
    for _ in range(2):  # nothing is left to train the second time
        names = sorted(path.name for path in tmp_path.glob("update-*"))
        assert names == [f"update-000000{name}" for name in kept]
        assert list(fx.fit(ctx, *_made(ctx, plan), tmp_path, **how)) == []


def test_a_schedule_of_as_many_steps_takes_any_number_of_restarts(ctx, tmp_path):
    whole = _fit(ctx, tmp_path / "whole", updates=14)
    for stop in (3, 4, 9, 13):
        fns, loader = _made(ctx)
        for report in fx.fit(ctx, fns, loader, tmp_path / "parts", updates=14, show=False):
            if report.position.updates >= stop:
                break
    _, weights = _fit(ctx, tmp_path / "parts", updates=14)
    assert weights == whole[1]
    assert _fit(ctx, tmp_path / "parts", updates=14) == ([], weights)


def _stops(fit):
    reports = fit()
    for _ in reports:
        reports.stop()


def _stops_in_a_block(fit):
    with fit() as reports:
        for _ in reports:
            reports.stop()
            break


def _stops_and_drops(fit):
    reports = fit()
    for _ in reports:
        reports.stop()
        break


def _stops_in_a_call(fit):
    reports = fit()
    list(map(lambda _: reports.stop(), reports))


def _stops_because_of_an_error(fit):
    with fit() as reports:
        for _ in reports:
            try:
                int("x")
            except ValueError:
                reports.stop()
                break


def _breaks(fit):
    for _ in fit():
        break


def _breaks_in_a_block(fit):
    with fit() as reports:
        for _ in reports:
            break


def _returns_while_an_error_is_handled(fit):
    try:
        int("x")
    except ValueError:
        with fit() as reports:
            for _ in reports:
                return


def _closes(fit):
    with contextlib.closing(fit()) as reports:
        next(reports)


def _raises(fit):
    with contextlib.suppress(KeyError):
        for _ in fit():
            raise KeyError("in the body")


def _raises_in_a_call(fit):
    with contextlib.suppress(TypeError):
        list(map(int, fit()))


def _raises_in_a_block(fit):
    with contextlib.suppress(TypeError), fit() as reports:
        list(map(int, reports))


def _raises_after_it_stopped(fit):
    with contextlib.suppress(KeyError), fit() as reports:
        for _ in reports:
            reports.stop()
            raise KeyError("in the body")


# Whether the run is marked as stopped, and its trackers are closed as failed.
LEFT = {
    _stops: (True, False),
    _stops_in_a_block: (True, False),
    _stops_and_drops: (True, False),
    _stops_in_a_call: (True, False),
    _stops_because_of_an_error: (True, False),
    _breaks: (False, True),  # Python tells no iterator why it is closed
    _breaks_in_a_block: (False, False),
    _returns_while_an_error_is_handled: (False, False),
    _closes: (False, True),
    _raises: (False, True),
    _raises_in_a_call: (False, True),
    _raises_in_a_block: (False, True),
    _raises_after_it_stopped: (False, True),
}


@pytest.mark.parametrize("leave", LEFT, ids=lambda one: one.__name__)
def test_only_a_call_of_stop_marks_a_run_as_stopped(ctx, tmp_path, caplog, leave):
    (fns, loader), closed = _made(ctx), []
    tracker = Tracker(
        name="mine", write=lambda *_: None, close=lambda native, failed: closed.append(failed)
    )
    leave(lambda: fx.fit(ctx, fns, loader, tmp_path, updates=9, show=False, to=[tracker]))
    gc.collect()
    left, (stopped, failed) = _files(tmp_path), LEFT[leave]
    assert closed == [failed]
    with caplog.at_level("INFO"):
        positions, _ = _fit(ctx, tmp_path, updates=9, resume="unless stopped")
    assert ("was stopped at update 1 by reports.stop(). It is left" in caplog.text) == stopped
    assert [one.updates for one in positions] == ([] if stopped else [*range(2, 10)])
    assert (_files(tmp_path) == left) == stopped
    with caplog.at_level("INFO"):
        positions, _ = _fit(ctx, tmp_path, updates=10)
    assert [one.updates for one in positions] == ([*range(2, 11)] if stopped else [10])
    assert ('It continues; resume="unless stopped" leaves' in caplog.text) == stopped
    assert _fit(ctx, tmp_path, updates=11, resume="unless stopped")[0][-1].updates == 11


def test_the_body_sees_the_rest_of_the_window_in_which_it_stops(ctx, tmp_path):
    fns, loader = _made(ctx, fx.Plan(accumulate=3), rows=14)
    seen = []
    with fx.fit(ctx, fns, loader, tmp_path, epochs=2, show=False) as reports:
        for report in reports:
            seen.append((report.position.updates, report.position.micro))
            if report.position.micro == 1 and report.position.updates == 1:
                reports.stop()
    assert seen == [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert _fit(ctx, tmp_path, _made(ctx, fx.Plan(accumulate=3), rows=14), epochs=2,
                resume="unless stopped")[0] == []  # fmt: skip
