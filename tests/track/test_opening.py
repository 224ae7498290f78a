"""Opening a run: trackers of packages, configs, and arguments that are refused."""

import importlib
import json

import attrs
import pytest

import fxtrain as fx
from fxtrain.track import read_run, trackers
from tests.track._trackers import own_tracker


@attrs.frozen(kw_only=True)
class Mine:
    kind: str = attrs.field(default="mine", init=False)


def _install(monkeypatch, row):
    class Entry:
        name, value = "mine", "somewhere:ROW"

        def load(self):
            return row

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Entry()])


def test_a_package_brings_a_tracker_by_entry_point(ctx, tmp_path, monkeypatch):
    kept, mine = own_tracker()
    row = attrs.evolve(mine, config=Mine)
    _install(monkeypatch, row)
    assert trackers()[Mine] is row
    with fx.track(tmp_path, ctx, [Mine()]) as run:
        run.log({"a": 1}, 1)
        assert run.native(Mine) is kept
    assert kept == [(1, {"a": 1.0})]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("text", "found str"),
        (own_tracker()[1], "has no config type"),
        (attrs.evolve(own_tracker()[1], config=fx.JsonLines), "second tracker for JsonLines"),
    ],
    ids=["text", "no-config", "twice"],
)
def test_a_wrong_entry_point_is_named(monkeypatch, row, words):
    _install(monkeypatch, row)
    with pytest.raises(fx.PlanError, match=words):
        trackers()


@pytest.mark.parametrize(
    ("to", "words"),
    [
        (["tensorbord"], r"Did you mean fx.TensorBoard\(...\)"),
        ([fx.WandB], r"Did you mean fx.WandB\(...\)"),
        ("jsonlines", r"Did you mean fx.JsonLines\(...\)"),
        ([Mine()], "no tracker carries out Mine"),
        ([3], "no tracker carries out 3"),
    ],
)
def test_an_unknown_tracker_is_named_with_the_nearest(ctx, tmp_path, to, words):
    with pytest.raises(fx.PlanError, match=words):
        fx.track(tmp_path / "run", ctx, to)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        fx.TensorBoard(), fx.WandB(project="p"), fx.Trackio(project="p"), fx.Comet(project="p"),
        fx.Aim(experiment="p"), fx.MLflow(experiment="p"), fx.ClearML(project="p"), fx.DVCLive(),
        fx.SwanLab(project="p"),
    ],
    ids=lambda config: config.kind,
)  # fmt: skip
def test_a_package_that_is_missing_is_named_with_its_extra(ctx, tmp_path, monkeypatch, config):
    find = importlib.import_module

    def missing(name):
        if not name.startswith("fxtrain"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return find(name)

    monkeypatch.setattr("fxtrain._optional.importlib.import_module", missing)
    words = rf"fx.{type(config).__name__}\(.*pip install 'fxtrain\[{config.kind}\]'"
    with pytest.raises(fx.MissingPackageError, match=words):
        fx.track(tmp_path, ctx, [config])


def test_configs_are_values_that_files_hold():
    config = fx.WandB(project="p", tags=("a", "b"), mode="offline")
    assert fx.loads(fx.dumps(config), fx.WandB) == config and hash(config)
    with pytest.raises(fx.PlanError, match="online"):
        fx.WandB(project="p", mode="ofline")
    with pytest.raises(fx.PlanError, match="printable"):
        fx.WandB(project=" ")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": 3}, "a path is a string"),
        ({"path": "s3://bucket/run"}, "local files"),
        ({"plan": {"seed": 1}}, "pass the fx.Plan"),
        ({"settings": 3}, "pass a mapping"),
        ({"name": 3}, "pass a string"),
        ({"ranks": "some"}, "'main' or 'all'"),
        ({"position": 3}, "where the run continues"),
        ({"resume": "folder"}, "where the run continues"),
        ({"resume": "yes", "position": fx.Position()}, "run.state"),
        ({"resume": {"id": "x"}, "position": fx.Position()}, "no run"),
        ({"resume": {"id": "0" * 32, "identities": 3}, "position": fx.Position()}, "no run"),
    ],
)
def test_arguments_that_make_no_sense_are_named(ctx, tmp_path, given, words):
    path = given.pop("path", tmp_path / "run")
    with pytest.raises(fx.PlanError, match=words):
        fx.track(path, ctx, **given)


def test_a_folder_that_cannot_be_made_is_named(ctx, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fx.PlanError, match="file"):
        fx.track(tmp_path / "file" / "run", ctx)


def test_lines_that_are_damaged_are_counted(ctx, tmp_path):
    with fx.track(tmp_path, ctx) as run:
        run.log({"a": 1}, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('nothing\n[1]\n{"step": "x"}\n')
    log = read_run(tmp_path)
    assert log.curve("a") == [(1, 1.0)] and log.damaged == 3
    json.loads((tmp_path / "run.json").read_text())
