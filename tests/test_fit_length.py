"""How long a run of `fit` is: epochs, updates, rows or tokens, and what a complete run leaves."""

import contextlib
import gc

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.trackers import read_run


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
    with pytest.raises(fx.PlanError, match=r"weighted by rows.*Weighted.*or pass rows="):
        _fit(ctx, tmp_path, tokens=100)


def test_a_length_is_required(ctx, tmp_path):
    fns, loader = _made(ctx)
    with pytest.raises(fx.PlanError, match="Pass epochs=, updates=, rows= or tokens="):
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


def _breaks(reports):
    for _ in reports():
        break


def _returns(reports):
    for report in reports():
        return report.position


def _closes(reports):
    with contextlib.closing(reports()) as held:
        next(held)


def _raises(reports):
    with contextlib.suppress(KeyError):
        for _ in reports():
            raise KeyError("in the body")


def _fails_in_a_call(reports):
    with contextlib.suppress(ValueError):
        for _ in reports():
            int("x")


def _raises_where_it_closes(reports):
    with contextlib.suppress(KeyError), contextlib.closing(reports()) as held:
        for _ in held:
            raise KeyError("in the body")


def _breaks_after_an_error(reports):
    for _ in reports():
        try:
            int("x")
        except ValueError as error:
            kept = error
        assert kept
        break


def _breaks_while_an_error_is_handled(reports):
    try:
        int("x")
    except ValueError:
        for _ in reports():
            break


def _raises_under_a_generator(reports):
    def passed_on():
        yield from reports()

    with contextlib.suppress(KeyError):
        for _ in passed_on():
            raise KeyError("in the body")


def _breaks_under_a_generator(reports):
    for _ in _Bar(reports()):
        break


class _Bar:
    """As that of tqdm."""

    def __init__(self, reports):
        self.reports = reports

    def __iter__(self):
        try:
            yield from iter(self.reports.__next__, None)
        finally:
            pass


def _raises_with_a_name(reports):
    def run():
        named = reports()
        for _ in named:
            raise KeyError("in the body")

    with contextlib.suppress(KeyError):
        run()


LEFT = {
    _breaks: True,
    _returns: True,
    _closes: True,
    _breaks_after_an_error: True,
    _breaks_while_an_error_is_handled: True,
    _raises: False,
    _fails_in_a_call: False,
    _raises_where_it_closes: False,
    _breaks_under_a_generator: True,
    _raises_under_a_generator: False,
    _raises_with_a_name: False,
}


@pytest.mark.parametrize("leave", LEFT, ids=lambda one: one.__name__)
def test_a_run_that_its_loop_stopped_says_so(ctx, tmp_path, caplog, leave):
    fns, loader = _made(ctx)
    leave(lambda: fx.fit(ctx, fns, loader, tmp_path, updates=9, show=False))
    gc.collect()
    left, stopped = _files(tmp_path), LEFT[leave]
    with caplog.at_level("INFO"):
        positions, _ = _fit(ctx, tmp_path, updates=9, resume="unless stopped")
    assert ("stopped it at update 1 (break). It is left as it is" in caplog.text) == stopped
    assert [one.updates for one in positions] == ([] if stopped else [*range(2, 10)])
    assert (_files(tmp_path) == left) == stopped
    with caplog.at_level("INFO"):
        positions, _ = _fit(ctx, tmp_path, updates=10)
    assert [one.updates for one in positions] == ([*range(2, 11)] if stopped else [10])
    assert ('It continues; resume="unless stopped" leaves' in caplog.text) == stopped
    assert _fit(ctx, tmp_path, updates=11, resume="unless stopped")[0][-1].updates == 11
