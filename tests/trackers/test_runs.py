"""What a run hands to its trackers: every value, in order, without waiting for anything."""

import math
import struct
import sys
import time
import zlib
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

import fxtrain as fx
from fxtrain.trackers import read_run
from fxtrain.trackers.libraries.clearml import CLEARML
from tests._errors import raises_code
from tests.profiling._dry_runs import DRY_DDP
from tests.trackers._trackers import HERE, own_tracker


def test_metrics_are_lines_of_json(ctx, tmp_path):
    values = {
        "loss": torch.tensor([[0.5]]),
        "whole": 3,
        "flag": True,
        "array": np.float32(0.25),
        "train": {"norm": torch.tensor(2, dtype=torch.int64), "deep": {"er": np.array([1.5])}},
        "mean": fx.Weighted(torch.tensor(6.0), 4),
        "absent": None,
    }
    with fx.track(tmp_path, ctx) as run:
        run.log(values, fx.Position(updates=3, samples=96, epoch=1))
        run.log({"loss": 0.25}, 4)
    log = read_run(tmp_path)
    first, second = log.entries
    assert first["values"] == {
        "loss": 0.5, "whole": 3.0, "flag": 1.0, "array": 0.25, "train/norm": 2.0,
        "train/deep/er": 1.5, "mean": 1.5,
    }  # fmt: skip
    assert (first["step"], first["rows"], first["epoch"]) == (3, 96, 1)
    assert (second["step"], "rows" in second) == (4, False)
    assert abs(first["time"] - time.time()) < 600
    assert log.curve("loss") == [(3, 0.5), (4, 0.25)] and log.damaged == 0
    assert log.id == run.id


def test_without_a_step_calls_are_counted_or_are_at_the_last_step(ctx, tmp_path):
    with fx.track(tmp_path, ctx) as run:
        run.log({"a": 1.0})
        run.log({"a": 2.0})
        run.text("note", "at the second call")
        run.log({"a": 3.0}, fx.Position(updates=10, samples=80))
        run.log({"b": 4.0})
        state = run.state()
    log = read_run(tmp_path)
    assert log.curve("a") == [(1, 1.0), (2, 2.0), (10, 3.0)]
    assert log.curve("b", over="rows") == [(80, 4.0)]
    assert [entry["step"] for entry in log.entries if "text" in entry] == [2]
    with fx.track(tmp_path, ctx, resume=state, position=fx.Position(updates=10)) as run:
        run.log({"a": 5.0})
    assert read_run(tmp_path).curve("a")[-1] == (11, 5.0)


def test_a_tensor_counts_as_it_was_when_it_was_logged(ctx, tmp_path):
    total = torch.zeros(())
    kept, mine = own_tracker()
    with fx.track(tmp_path, ctx, [mine]) as run:
        for step in range(100):
            run.log({"total": total, "leaf": total.clone().requires_grad_()}, step)
            total += 1
    assert kept == [(step, {"total": step, "leaf": step}) for step in range(100)]


def test_hyperparameters_are_the_plan_the_context_and_the_settings(ctx, tmp_path):
    @attrs.frozen
    class Model:
        width: int = 64

    settings = {"lr": 0.1, "model": Model(), "layers": [1, 2], "none": None, "nan": math.nan}
    plan = fx.Plan(seed=7, precision="bf16", recompute=("Block",))
    with fx.track(tmp_path, ctx, plan=plan, settings=settings):
        pass
    params = read_run(tmp_path).starts[0]["params"]
    expected = {
        "lr": 0.1, "model.width": 64, "layers": "[1, 2]", "none": None, "nan": "nan",
        "plan.seed": 7, "plan.precision.compute": "bf16", "plan.recompute": '["Block"]',
        "plan.strategy.kind": "ddp", "plan.fingerprint": fx.fingerprint(plan),
        "context.world_size": 1, "context.device": "cpu", "context.mesh.replicate": 1,
    }  # fmt: skip
    assert {name: params[name] for name in expected} == expected
    assert "" not in params


def _pixels(path):
    """The pixels of an 8-bit PNG file, rows as lists."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, color = struct.unpack(">IIBB", data[16:26])
    channels = {0: 1, 2: 3, 6: 4}[color]
    size = struct.unpack(">I", data[33:37])[0]
    raw = zlib.decompress(data[41 : 41 + size])
    row = 1 + width * channels
    lines = [raw[start : start + row] for start in range(0, len(raw), row)]
    assert depth == 8 and len(lines) == height and all(line[0] == 0 for line in lines)
    flat = [list(line[1:]) for line in lines]
    return torch.tensor(flat).reshape(height, width, channels)


@pytest.mark.parametrize("channels", [0, 1, 3, 4])
def test_images_are_png_files(ctx, tmp_path, channels):
    image = torch.linspace(0, 1, max(channels, 1) * 20).reshape(-1, 4, 5)
    shown = image[0] if channels == 0 else image
    with fx.track(tmp_path, ctx) as run:
        run.image("a/b", shown, HERE)
        run.image("bytes", np.full((3, 2, 2), 7, dtype=np.uint8), HERE)
    first, second = (next(iter(e["image"].values())) for e in read_run(tmp_path).entries)
    expected = image.mul(255).round().to(torch.int64).permute(1, 2, 0)
    assert torch.equal(_pixels(tmp_path / first), expected)
    assert _pixels(tmp_path / second).unique().tolist() == [7]


def test_tables_texts_and_artifacts_are_lines_too(ctx, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("x")
    with fx.track(tmp_path / "run", ctx) as run:
        run.table("t", {"a": torch.tensor([1, 2]), "b": ["x", math.inf]}, HERE)
        run.text("note", "hé\nllo", HERE)
        run.artifact("notes", file, HERE)
    table, text, artifact = read_run(tmp_path / "run").entries
    assert table["table"] == {"t": {"columns": ["a", "b"], "rows": [[1, "x"], [2, "inf"]]}}
    assert text["text"] == {"note": "hé\nllo"}
    assert artifact["artifact"] == {"notes": str(file)}


def test_numbers_that_are_not_finite_are_kept_and_named_once(ctx, tmp_path, told):
    with fx.track(tmp_path, ctx) as run:
        for value in (math.nan, math.inf, torch.tensor(-math.inf)):
            run.log({"loss": value}, 1)
    values = [value for _, value in read_run(tmp_path).curve("loss")]
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf]
    assert told() == ["The metric loss is nan at step 1."]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0.5", "found '0.5'"),
        (torch.ones(3), r"shape (3,)"),
        (torch.tensor(1j), "complex"),
        (np.array(["x"]), "found array"),
        (10**400, "too large"),
        ([1.0], "found [1.0]"),
    ],
    ids=["text", "vector", "complex", "array", "huge", "list"],
)
def test_a_metric_that_is_no_number_is_named_once_and_the_others_stay(
    ctx, tmp_path, told, value, words
):
    with fx.track(tmp_path, ctx, [fx.JsonLines(), own_tracker()[1]]) as run:
        run.log({"bad": value, "loss": 0.5}, 1)
        run.log({"bad": value, "loss": 0.5}, 2)
    assert read_run(tmp_path).curve("loss") == [(1, 0.5), (2, 0.5)]
    (line,) = told()
    assert "'bad'" in line and words in line and "step 1" in line


def test_values_that_cannot_be_written_are_named_and_training_continues(ctx, tmp_path, told):
    with fx.track(tmp_path, ctx) as run:
        run.image("flat", torch.ones(7), HERE)
        run.image("words", "no image", HERE)
        run.image("numbers", torch.ones(2, 2, dtype=torch.int64), HERE)
        run.table("ragged", {"a": [1], "b": [1, 2]}, HERE)
        run.artifact("gone", tmp_path / "gone", HERE)
        run.log({"loss": 1.0}, HERE)
    assert [*read_run(tmp_path).entries[0]["values"]] == ["loss"]
    assert len(told()) == 5
    for words in ("(7,)", "torch.int64", "zip() argument 2 is longer", "No such file"):
        assert any(words in line for line in told()), words


@pytest.mark.parametrize(
    "call",
    [
        lambda run: run.log([0.5], 1),
        lambda run: run.log({"a": 1}, 1.5),
        lambda run: run.log({"a": 1}, True),
        lambda run: run.log({"a": 1}, -1),
        lambda run: run.image("a", torch.ones(2, 2), "last"),
    ],
)
def test_a_wrong_call_is_an_error(ctx, tmp_path, call):
    with fx.track(tmp_path, ctx) as run, raises_code("FX200", "takes a"):
        call(run)


def test_a_closed_run_refuses_every_call(ctx, tmp_path):
    with fx.track(tmp_path, ctx) as run:
        pass
    run.close()
    with raises_code("FX200", "closed"):
        run.log({"a": 1}, 1)


def test_an_exception_in_the_loop_loses_nothing(ctx, tmp_path):
    ends = []
    kept, mine = own_tracker(close=lambda kept, failed: ends.append(failed))
    with pytest.raises(KeyboardInterrupt), fx.track(tmp_path, ctx, [fx.JsonLines(), mine]) as run:
        for step in range(500):
            run.log({"a": step}, step)
        raise KeyboardInterrupt
    assert len(kept) == len(read_run(tmp_path).entries) == 500
    assert ends == [True]


def test_one_of_your_own_in_ten_lines(ctx, tmp_path):
    kept, mine = own_tracker()
    with fx.track(tmp_path, ctx, [fx.JsonLines(), mine]) as run:
        run.log({"loss": 0.5}, 1)
        run.flush()
        assert kept == [(1, {"loss": 0.5})]
        assert run.native(mine) is kept
        assert run.native(fx.JsonLines).path == tmp_path / "metrics.jsonl"
        assert run.native(fx.WandB) is None


def test_log_makes_no_random_number_and_opening_takes_none(ctx, tmp_path):
    import random

    def open_(config, start):
        random.random(), torch.rand(1), np.random.rand()
        return []

    _, mine = own_tracker(open=open_)
    fx.ops.seed(3, ctx)
    with fx.track(tmp_path, ctx, [mine, fx.JsonLines()]) as run:
        run.log({"a": torch.ones(())}, 1)
    after = random.random(), torch.rand(1), np.random.rand()
    fx.ops.seed(3, ctx)
    assert after == (random.random(), torch.rand(1), np.random.rand())


def test_the_terminal_shows_lines_now_and_then(ctx, tmp_path, capsys):
    with fx.track(tmp_path, ctx, [fx.trackers.Terminal(every_s=1000, digits=3)]) as run:
        for step in range(1, 5):
            run.log({"loss": 1 / step, "a\x1b": 1}, fx.Position(updates=step, samples=step))
        run.text("note", "hello", 4)
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "update 1  rows 1  epoch 0  loss 1  a\\x1b 1",
        "update 4  note: hello",
        "update 4  rows 4  epoch 0  loss 0.25  a\\x1b 1",
    ]


@DRY_DDP
def test_a_dry_run_writes_nothing(tmp_path):
    def train(ctx):
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data).sum())
        loader = fx.shard(torch.utils.data.DataLoader(torch.ones(64, 2), batch_size=2), ctx)
        with fx.track(tmp_path, ctx) as run:
            for batch in loader:
                report = fx.step(ctx, batch, fns)
                run.log({"loss": report.loss}, report.position)

    assert fx.dry_run(train, world=4).fits
    assert list(tmp_path.iterdir()) == []


def _position(step):
    return fx.Position(updates=step, samples=8 * step)


def _log(run, steps):
    for step in steps:
        run.log({"loss": step, "even": None if step % 2 else step}, _position(step))
        if step == 3:
            run.text("note", "hello", _position(step))


def _continued(ctx, folder, **functions):
    """A run that is killed after step 5 and continued from step 2; what the tracker was given."""

    def write(kept, entry):
        values = entry.value if entry.kind == "log" else {entry.name: entry.value}
        kept.append((entry.step, dict(values)))

    kept, mine = own_tracker(write=write, kinds=("log", "text"), **functions)
    with fx.track(folder, ctx, [fx.JsonLines(), mine]) as run:
        _log(run, range(1, 6))
    with fx.track(folder, ctx, [fx.JsonLines(), mine], resume="folder", position=_position(2)) as r:
        _log(r, range(3, 8))
    assert read_run(folder).curve("loss") == [(step, step) for step in range(1, 8)]
    return [(step, name, value) for step, values in kept for name, value in values.items()]


def _last(kept, start):
    found = {}
    for step, values in kept:
        found |= dict.fromkeys(values, step)
    return found


def test_a_tracker_that_knows_its_last_steps_has_every_step_once(ctx, tmp_path, told):
    kept = _continued(ctx, tmp_path, last_steps=_last)
    assert [step for step, name, _ in kept if name == "loss"] == list(range(1, 8))
    assert [step for step, name, _ in kept if name == "even"] == [2, 4, 6]
    assert [step for step, name, _ in kept if name == "note"] == [3]
    (line,) = told()
    assert "Mine cannot remove the entries after the position" in line


def test_what_the_last_step_lacked_is_written(ctx, tmp_path):
    """The process was killed between two calls at step 5."""
    kept, mine = own_tracker(last_steps=_last)
    with fx.track(tmp_path, ctx, [mine]) as run:
        run.log({"loss": 5}, 5)
    with fx.track(tmp_path, ctx, [mine], resume="folder", position=_position(4)) as run:
        run.log({"loss": 5}, 5)
        run.log({"eval": 1}, 5)
    assert kept == [(5, {"loss": 5.0}), (5, {"eval": 1.0})]


def test_a_tracker_that_cannot_tell_is_named_and_gets_everything(ctx, tmp_path, told):
    def fail(native, start):
        raise OSError("no route")

    kept = _continued(ctx, tmp_path, last_steps=fail)
    assert [step for step, name, _ in kept if name == "loss"] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    (line,) = told()
    assert "Mine failed in last_steps: OSError: no route" in line


def test_clearml_continues_a_task_at_its_own_steps(ctx, tmp_path, monkeypatch):
    """Otherwise it adds the last iteration of the task to every step that is logged."""
    offsets = []

    class Task:
        current_task = staticmethod(lambda: None)

        @staticmethod
        def init(*, continue_last_task, **settings):
            if continue_last_task:
                offsets.append(6)
            return SimpleNamespace(id="t1", set_initial_iteration=offsets.append)

    monkeypatch.setitem(sys.modules, "clearml", SimpleNamespace(Task=Task))
    config = fx.trackers.ClearML(project="p", online=True)
    start = SimpleNamespace(name="run", identity="t1", resumed=True)
    CLEARML.open(config, start)
    assert offsets[-1] == 0
    offsets.clear()
    CLEARML.open(config, SimpleNamespace(name="run", identity="", resumed=False))
    assert offsets == []
