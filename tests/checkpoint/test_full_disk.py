"""A disk that fills: one clear error on every rank, and what was complete stays as it was."""

import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.trackers import read_run

FIRST = "update-0000000001"
NO_ROOM = "No space left on device"


@pytest.fixture
def tiny_disk():
    """A file system of 512 KiB."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], capture_output=True
        )
        if mounted.returncode:
            pytest.skip("mounting a small file system needs root")
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)


@contextmanager
def _full(folder, left=0):
    """The disk of a folder has room for `left` bytes."""
    filler = Path(folder) / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            file.truncate(file.tell() - left)
    try:
        yield
    finally:
        filler.unlink()


def _model(ctx):
    return fx.wrap(nn.Linear(160, 160), ctx)  # 103 kB, and 30 kB of generators


def _fill_up(ctx, folder, left, background):
    """Save once, then on a full disk, then when there is room again."""
    model, texts = _model(ctx), []

    def save(update):
        try:
            at = fx.Position(updates=update)
            fx.save(folder, ctx, model, position=at, background=background).result()
            texts.append(None)
        except fx.CheckpointError as error:
            texts.append(str(error))
        fx.ops.barrier(ctx)

    save(1)
    with _full(folder, left) if ctx.is_main else _nothing():
        fx.ops.barrier(ctx)
        save(2)
        names = sorted(os.listdir(folder))
        fx.ops.barrier(ctx)
    fx.ops.barrier(ctx)
    whole = fx.checkpoint.verify(folder).position.updates
    fx.ops.barrier(ctx)
    save(3)
    return texts, names, whole


@contextmanager
def _nothing():
    yield


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("left", [0, 50_000])
def test_a_save_fails_on_every_rank_and_the_next_one_succeeds(pair, tiny_disk, left, background):
    folder = os.path.join(tiny_disk, "runs")
    for texts, names, whole in pair.run(_fill_up, folder, left, background):
        assert texts[0] is None and NO_ROOM in texts[1] and texts[2] is None
        assert (names, whole) == (["filler", FIRST], 1)
    assert fx.checkpoint.verify(folder).position.updates == 3


def _export(ctx, folder, left, sharded):
    """Export twice, the second time without room, and once more."""
    texts = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        model = _model(ctx)
        full = _full(os.path.dirname(folder), left) if seed == 2 and ctx.is_main else _nothing()
        with full:
            fx.ops.barrier(ctx)
            try:
                fx.export(model, folder, max_shard=60_000, sharded=sharded)
                texts.append(None)
            except fx.CheckpointError as error:
                texts.append(str(error))
            fx.ops.barrier(ctx)
        fx.ops.barrier(ctx)
        if seed == 2:
            net = nn.Linear(160, 160)
            fx.load_model(folder, net)
            torch.manual_seed(1)
            same = torch.equal(net.weight, nn.Linear(160, 160).weight)
            names = sorted(os.listdir(folder))
    return texts, same, names


@pytest.mark.parametrize("sharded", [False, True])
def test_an_export_fails_on_every_rank_and_the_earlier_one_stays(pair, tiny_disk, sharded):
    for texts, same, names in pair.run(_export, f"{tiny_disk}/model", 50_000, sharded):
        assert texts[0] is None and NO_ROOM in texts[1] and texts[2] is None
        assert same and all(name.startswith("model") for name in names)


def test_a_merge_leaves_the_earlier_files(tiny_disk, tmp_path, capsys):
    with fx.detect(env={}, device="cpu") as ctx:
        fx.save(tmp_path, ctx, _model(ctx), position=fx.Position(updates=1))
    out = Path(tiny_disk, "model")
    fx.checkpoint.merge(tmp_path, out)
    before = (out / "model.safetensors").read_bytes()
    with _full(tiny_disk, 50_000):
        with pytest.raises(fx.CheckpointError, match=NO_ROOM):
            fx.checkpoint.merge(tmp_path, out)
        assert main(["merge-weights", str(tmp_path), str(out)]) == 2
    assert NO_ROOM in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert (out / "model.safetensors").read_bytes() == before


def _run(tiny_disk):
    """Six updates of three epochs, on one rank."""
    with fx.detect(env={}, device="cpu") as ctx:
        net = nn.Linear(160, 160)
        model = fx.wrap(net, ctx, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
        loader = fx.shard(DataLoader(list(torch.ones(4, 160)), batch_size=2), ctx)
        for report in fx.fit(ctx, fns, loader, tiny_disk, epochs=3, show=False):
            yield report.position.updates


def test_a_run_continues_once_there_is_room(tiny_disk):
    seen = []
    with pytest.raises(fx.CheckpointError, match=NO_ROOM):
        for update in _run(tiny_disk):
            seen.append(update)
            if update == 5:
                filler = _full(tiny_disk)
                filler.__enter__()
    filler.__exit__(None, None, None)
    saved = fx.checkpoint.verify(
        tiny_disk
    ).position.updates  # the save of update 4 is in the background
    assert saved in (2, 4)
    assert list(_run(tiny_disk)) == list(range(saved + 1, 7))
    assert fx.checkpoint.verify(tiny_disk).position.updates == 6


def test_a_tracker_names_lost_entries_and_leaves_whole_lines(tiny_disk, caplog):
    with fx.detect(env={}, device="cpu") as ctx, fx.track(tiny_disk, ctx) as run:
        run.log({"a": 1}, 1)
        run.flush()
        with _full(tiny_disk):
            for step in range(2, 200):
                run.log({"a" * 100: step}, step)
            run.flush()
        run.log({"a": 200}, 200)
    assert any(NO_ROOM in one.getMessage() for one in caplog.records)
    log = read_run(tiny_disk)
    assert log.damaged == 0 and log.curve("a") == [(1, 1.0), (200, 200.0)]


WRITES = {
    "report": lambda run, path: main(["report", str(run), "--output", f"{path}.html"]),
    "curve": lambda run, path: main(
        ["report", str(run), "--curve", "a", "--output", f"{path}.png"]
    ),
    "plan": lambda run, path: _refused(fx.write_plan, fx.Plan(), f"{path}.toml"),
}


def _refused(call, *args):
    with pytest.raises(fx.PlanError, match=NO_ROOM):
        call(*args)
    return 2


@pytest.mark.parametrize("name", WRITES)
def test_a_file_is_written_completely_or_not_at_all(tiny_disk, tmp_path, capsys, name):
    pytest.importorskip("matplotlib")
    with fx.detect(env={}, device="cpu") as ctx, fx.track(tmp_path, ctx) as run:
        run.log({"a": 1}, 1)
    path = Path(tiny_disk, "out")
    with _full(tiny_disk):
        assert WRITES[name](tmp_path, path) == 2
        assert os.listdir(tiny_disk) == ["filler"]
    told = capsys.readouterr().err
    assert name == "plan" or (NO_ROOM in told and str(path) in told and len(told) < 300)
