"""`fit` in one process: what it keeps, refuses and costs, also with another plan or other data."""

import ast
import gc
import io
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

import fxtrain as fx
from fxtrain._display import show_bytes
from fxtrain.loop import fitting
from fxtrain.trackers import progress as showing
from fxtrain.trackers import read_run
from fxtrain.trackers.progress import progress
from tests._errors import raises_code


def _made(ctx, rows=8):
    torch.manual_seed(0)
    model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    return fns, fx.shard(DataLoader(torch.ones(rows, 1), batch_size=2), ctx)


def _fit(ctx, folder, *, rows=8, **how):
    fns, loader = _made(ctx, rows)
    return list(fx.fit(ctx, fns, loader, folder, **{"epochs": 3, "show": False, **how}))


def _kept(folder):
    return [int(path.name[-2:]) for path in sorted(folder.glob("update-*"))]


@pytest.mark.parametrize("kind", [torch.tensor, np.float32], ids=["tensor", "numpy"])
def test_it_keeps_the_last_and_the_best(ctx, tmp_path, kind):
    scores = iter([3.0, 1.0, float("nan"), 4.0, 5.0])
    reports = _fit(
        ctx,
        tmp_path,
        epochs=5,
        save_every=2,
        keep_last=1,
        keep_best=1,
        metric="s",
        evaluate=lambda: {"s": kind(next(scores))},
    )
    assert _kept(tmp_path) == [8, 20]
    assert [one.metrics["s"] for one in reports if one.metrics][:2] == [3.0, 1.0]
    assert read_run(tmp_path).curve("eval/s")[1] == (8, 1.0)


def test_what_is_not_asked_for_is_not_saved(ctx, tmp_path, caplog):
    _fit(ctx, tmp_path, save_epochs=False)
    assert _kept(tmp_path) == [12]
    with caplog.at_level("INFO"):
        assert _fit(ctx, tmp_path, save_epochs=False) == []  # it is complete
    assert "ended at update 12. Continue with epochs > 3." in caplog.text
    assert _kept(tmp_path) == [12]
    assert len(_fit(ctx, tmp_path, epochs=4)) == 4
    _fit(ctx, tmp_path / "by the clock", save_epochs=False, save_minutes=1e-9)
    assert _kept(tmp_path / "by the clock") == list(range(1, 13))


def _change_a_byte(path):
    (file,) = path.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_where_there_is_an_earlier_one(ctx, tmp_path, caplog):
    wanted = [report.loss for report in _fit(ctx, tmp_path / "whole")]
    _fit(ctx, tmp_path, updates=6, save_every=2)
    _change_a_byte(tmp_path / "update-0000000006")
    losses = [report.loss for report in _fit(ctx, tmp_path)]
    assert losses == wanted[-len(losses) :] and len(losses) == 12 - 4
    assert "update-0000000004 is restored, since" in caplog.text and "was changed in" in caplog.text
    for path in tmp_path.glob("update-*"):
        _change_a_byte(path) if path.name != "update-0000000006" else None
    with raises_code("FX602"):
        _fit(ctx, tmp_path, epochs=4)


def test_a_break_between_two_checks_ends_at_the_next(ctx, tmp_path):
    fns, loader = _made(ctx)
    for report in fx.fit(ctx, fns, loader, tmp_path, epochs=2, show=False, check_every=3):
        if report.position.updates == 4:
            break
        if report.position.updates == 1:
            continue
    assert _kept(tmp_path)[-1] == 4  # the last of its epoch
    for report in fx.fit(ctx, fns, loader, tmp_path, epochs=9, show=False, check_every=3):
        if report.position.updates == 10:
            break
    assert _kept(tmp_path)[-1] == 12


def test_an_iterator_that_is_dropped_has_saved(ctx, tmp_path):
    fns, loader = _made(ctx)
    reports = fx.fit(ctx, fns, loader, tmp_path, epochs=2, show=False)
    next(reports)
    del reports
    gc.collect()
    assert _kept(tmp_path) == [1]


BAD = {
    "epochs": ({"epochs": "3"}, r"^fit\(epochs='3'\)"),
    "save": ({"save_every": 0}, r"^fit\(save_every=0\)"),
    "metric": ({"metric": "a", "evaluate": lambda: {"b": 1.0}}, "name of one of its values: b"),
    "no metric": ({"keep_best": 1, "evaluate": lambda: {"b": 1.0}}, "one of its values: b"),
    "no number": ({"keep_best": 1, "evaluate": lambda: (1.0, 2.0)}, "has no number to compare"),
    "no evaluation": ({"keep_best": 1}, "pass evaluate too"),
    "signal": ({"signals": "SIGNOTHING"}, "not a signal"),
    "tracker": ({"to": ["tensorbord"]}, r"'tensorbord'.*Did you mean fx\.TensorBoard"),
    "one tracker": ({"to": "wandbb"}, r"'wandbb'.*Did you mean fx\.WandB"),
    "no tracker": ({"to": 3}, "no tracker is registered for 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(ctx, tmp_path, name):
    how, words = BAD[name]
    with pytest.raises(fx.FxError, match=words):
        _fit(ctx, tmp_path, **how)


def test_a_loader_that_is_not_sharded_is_refused(ctx, tmp_path):
    fns, _ = _made(ctx)
    with raises_code("FX200", "fx.shard"):
        fx.fit(ctx, fns, DataLoader(torch.ones(2)), tmp_path, epochs=1)


def test_another_run_in_the_folder_is_refused(ctx, tmp_path):
    _fit(ctx, tmp_path)
    with raises_code("FX200", "resume"):
        _fit(ctx, tmp_path, resume=False)


def _calls(run):
    """Python functions entered in this thread."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_it_adds_at_most_15_python_calls_to_a_step(ctx, tmp_path):
    """Of updates, with an entry at every tenth; what happens once per run cancels out."""

    def by_hand(rows):
        fns, loader = _made(ctx, rows)
        return _calls(lambda: [fx.step(ctx, b, fns) for e in loader.epochs(1) for b in e])

    def fitted(rows):
        fns, loader = _made(ctx, rows)
        return _calls(lambda: list(fx.fit(ctx, fns, loader, tmp_path / str(rows), epochs=1)))

    steps = (20, 120)
    for run in (by_hand, fitted):
        run(2)  # what is imported or made once
    plain, more = ([run(2 * n) for n in steps] for run in (by_hand, fitted))
    added = ((more[1] - more[0]) - (plain[1] - plain[0])) / (steps[1] - steps[0])
    assert 0 < added <= 15


def test_it_is_short():
    """Under 180 lines of code, without its signature, arguments and documentation."""
    tree = ast.parse(Path(fitting.__file__).read_text())
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name != "fit"]
    lines = 0
    for function in functions:
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines += body[-1].end_lineno - body[0].lineno + 1
    assert 50 < lines < 180


def test_progress_is_a_line_where_there_is_no_terminal(ctx, tmp_path, capsys):
    tracker = progress(4, every_s=0.0, console=Console(stderr=True, force_terminal=False))
    with fx.track(tmp_path, ctx, [tracker]) as run:
        run.log({"loss": 0.5, "lr": 0.1, "rows_per_s": 12.0, "memory_gib": 1.5}, 2)
        run.log({"eval": {"a": 0.25}}, 2)
        run.log({"loss": 0.25, "rows_per_s": 12.0}, 3)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("update 2 of 4  loss 0.5  12 rows/s  1.5 GiB  0:00:00 left")
    assert "eval/a 0.25" in second and "eval/a 0.25" in third and "loss 0.25" in third


KEPT = {
    "epochs": {"epochs": 3},
    "updates": {"updates": 10, "save_every": 3},
    "between epochs": {"epochs": 2, "save_every": 3, "save_epochs": False},
    "minutes": {"epochs": 3, "save_minutes": 60.0},
    "last": {"epochs": 3, "keep_last": 2},
    "best": {"epochs": 3, "keep_best": 1, "evaluate": lambda: 1.0},
}


@pytest.mark.parametrize("name", KEPT)
def test_the_disk_that_checkpoints_take_is_said_once_where_all_are_kept(
    ctx, tmp_path, caplog, name
):
    with caplog.at_level("INFO"):
        _fit(ctx, tmp_path, **KEPT[name])
    lines = [line for line in caplog.messages if "all are kept" in line]
    if name in ("last", "best"):
        assert not lines
        return
    sizes = [
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in tmp_path.glob("update-*")
    ]
    assert len(set(sizes)) == 1
    (line,) = lines
    assert f"a checkpoint in {tmp_path} takes {show_bytes(sizes[0])}, " in line
    total = f": {len(sizes)} in this run, about {show_bytes(sum(sizes))}. keep_last=2"
    assert (total in line) == (name != "minutes")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_time_left_is_by_the_clock_since_the_run_was_opened(ctx, tmp_path, clock_of, terminal):
    """Also where entries are further apart than the half minute that bars of rich look back."""
    seen, clock = io.StringIO(), itertools.chain([0.0], itertools.repeat(30.0))
    console = Console(file=seen, force_terminal=terminal, width=120)
    clock_of(showing, clock=SimpleNamespace(monotonic=lambda: next(clock)))
    with fx.track(tmp_path, ctx, [progress(4, every_s=0.0, console=console)]) as run:
        run.log({"loss": 0.5, "rows_per_s": 12.0, "evaluate_s": 3.0}, 3)
    assert "0:00:10 left" in seen.getvalue() and "loss 0.5" in seen.getvalue()
    assert ("3/4" if terminal else "update 3 of 4") in seen.getvalue()
    assert "evaluate" not in seen.getvalue()


def test_the_loop_of_the_docs_gives_the_same_parameters(ctx, tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "fit.md").read_text()
    code = text.split("<!-- example: by_hand -->\n```python\n")[1].split("```")[0]
    names = {"fx": fx}
    exec(code, names)
    found = []
    for name in ("hand", "fit"):
        fns, loader = _made(ctx)
        for epochs in (1, 3):
            if name == "hand":
                names["fit_by_hand"](ctx, fns, loader, tmp_path / name, epochs, lambda: 0.5)
            else:
                how = {"epochs": epochs, "show": False, "evaluate": lambda: 0.5, "keep_last": 2}
                list(fx.fit(ctx, fns, loader, tmp_path / name, **how))
        found.append({key: value.tolist() for key, value in fx.weights(fns.model)})
    assert found[0] == found[1]
    by_hand, fitted = (read_run(tmp_path / name) for name in ("hand", "fit"))
    assert by_hand.curve("eval") == fitted.curve("eval") == [(n, 0.5) for n in (4, 8, 12)]
    assert _kept(tmp_path / "hand") == _kept(tmp_path / "fit")


def _counted(ctx, folder, updates):
    """Run a script whose body keeps names for parts of `extra`, and return these."""
    counts, history = {"bodies": 0, "rule": fx.EarlyStopping(patience=9)}, []
    fns, loader = _made(ctx)
    extra = {"counts": counts, "history": history}
    for report in fx.fit(ctx, fns, loader, folder, updates=updates, extra=extra, show=False):
        counts["bodies"] += 1
        counts["rule"] = counts["rule"].update(1.0)
        history.append(report.updates)
    return counts, history


def test_dicts_and_lists_inside_extra_are_filled_in_place(ctx, tmp_path):
    _counted(ctx, tmp_path, 2)
    for updates in (5, 5):  # the second finds the run complete
        counts, history = _counted(ctx, tmp_path, updates)
        assert counts["bodies"] == 5 and counts["rule"].waited == 4
        assert history == [1, 2, 3, 4, 5]


def test_the_loader_has_the_batch_of_the_body_also_when_a_run_continues(ctx, tmp_path):
    for updates in (2, 5):
        fns, loader = _made(ctx)
        for report in fx.fit(ctx, fns, loader, tmp_path, updates=updates, show=False):
            assert loader.batch.position == report.position


class Batches(BatchSampler):
    """Not torch's own, so that a loader distributes its batches whole."""


def _fit_changes(
    ctx, folder, *, updates, rows=12, batch=2, seed=3, shuffle=True, units=False, **plan
):
    torch.manual_seed(0)
    plan = fx.Plan(seed=seed, **plan)
    model = fx.wrap(
        torch.nn.Linear(1, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    data = torch.arange(rows, dtype=torch.float32)[:, None]
    if units:
        how = {"batch_sampler": Batches(RandomSampler(data), batch, drop_last=False)}
    else:
        how = {"batch_size": batch, "shuffle": shuffle}
    loader = fx.shard(DataLoader(data, **how), ctx, plan)
    return [r.position for r in fx.fit(ctx, fns, loader, folder, updates=updates, show=False)]


MOVED = {
    "rows": ({"rows": 10}, "rows or batches in an epoch 12 when it was saved, 10 now"),
    "seed": ({"seed": 4}, "order RandomSampler with seed 3 when it was saved, Ran.* seed 4 now"),
    "order": ({"shuffle": False}, "order RandomSampler with seed 3 .* SequentialSampler now"),
    "unit": ({"units": True}, "unit row when it was saved, batch now"),
}


class Longer(Sampler):
    """Two rows, and four more in each later epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 2 + 4 * self.epoch

    def __iter__(self):
        return iter(range(len(self)))


def test_a_run_continues_inside_an_epoch_that_is_longer_than_the_first(ctx, tmp_path):
    def run(updates):
        model, data = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=torch.optim.SGD), torch.ones(9)
        fns = fx.StepFns(model, lambda model, batch: model(batch.data[:, None]).square().mean())
        loader = fx.shard(DataLoader(data, batch_size=2, sampler=Longer()), ctx)
        reports = fx.fit(ctx, fns, loader, tmp_path, epochs=2, updates=updates, show=False)
        return [(report.position.epoch, report.position.index) for report in reports]

    assert run(3) == [(0, 2), (1, 2), (1, 4)]
    assert run(9) == [(1, 6)]


@pytest.mark.parametrize("name", MOVED)
def test_a_position_that_means_another_row_is_refused(ctx, tmp_path, name):
    how, words = MOVED[name]
    _fit_changes(ctx, tmp_path, updates=3)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(fx.errors.DataError, match=words):
        _fit_changes(ctx, tmp_path, updates=5, **how)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    _fit_changes(
        ctx, tmp_path, updates=6
    )  # to the end of the epoch, where an epoch of other data begins
    assert _fit_changes(ctx, tmp_path, updates=7, **how)[-1].epoch == 1


def test_other_data_is_one_line_and_another_plan_is_one(ctx, tmp_path, caplog):
    _fit_changes(ctx, tmp_path, updates=3)
    with caplog.at_level("INFO"):
        _fit_changes(ctx, tmp_path, updates=4)
    assert "continues on" not in caplog.text and "differs" not in caplog.text
    with caplog.at_level("INFO"):
        _fit_changes(ctx, tmp_path, updates=5, batch=1, accumulate=2, clip_norm=1.0)
    assert "continues on other data: batch 2 → 1." in caplog.text
    assert caplog.text.count("accumulate") == 1  # `restore` has logged it


def test_a_loop_by_hand_is_told_which_changes_train_otherwise(ctx, tmp_path, caplog):
    def wrapped(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **plan):
        return fx.wrap(torch.nn.Linear(1, 1), ctx, fx.Plan(**plan), optimizer=optimizer)

    fx.save(tmp_path, ctx, wrapped(seed=1, batch="global"))
    with caplog.at_level("INFO"):
        fx.restore(tmp_path, ctx, wrapped(seed=1, batch="global", strategy="fsdp", mesh="shard=1"))
        fx.restore(tmp_path, ctx, wrapped(None, seed=2))  # it does not train
    assert not caplog.messages
    with caplog.at_level("INFO"):
        fx.restore(tmp_path, ctx, {"model": wrapped(seed=2, accumulate=2, precision="bf16")})
    (line,) = [message for message in caplog.messages if message.startswith("restore:")]
    assert line.startswith("restore: the plan of 'model' differs from that of")
    assert line.endswith(
        ": precision.compute 'fp32' → 'bf16'; accumulate 1 → 2; batch 'global' → 'per_rank'; "
        "seed 1 → 2."
    )


def test_the_windows_are_those_of_the_model(ctx, tmp_path):
    plan = fx.Plan(accumulate=3, flush=False)
    model = fx.wrap(
        torch.nn.Linear(1, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    loader = fx.shard(DataLoader(torch.ones(10, 1), batch_size=1), ctx, fx.Plan(accumulate=2))
    reports = list(fx.fit(ctx, fns, loader, tmp_path, updates=4, show=False))
    assert [r.updates for r in reports] == [r.position.updates for r in reports]
    assert (len(reports), reports[-1].updates, reports[-1].applied) == (12, 4, True)
