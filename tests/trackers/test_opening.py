"""Opening a run: trackers of packages, configs, and arguments that are refused."""

import importlib
import json
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import attrs
import pytest

import fxtrain as fx
from fxtrain.state.registry import kind_of
from fxtrain.trackers import (
    TRACKERS,
    Aim,
    Comet,
    DVCLive,
    SwanLab,
    Trackio,
    read_run,
    trackers,
)
from tests._errors import raises_code
from tests.trackers._offline import CONFIGS
from tests.trackers._readers import READERS
from tests.trackers._trackers import own_tracker

ROOT = Path(__file__).parents[2]


@attrs.frozen(kw_only=True)
class Mine:
    kind: str = attrs.field(default="mine", init=False)


ENTRY = "[fxtrain.trackers]\nmine = somewhere:ROW"


@pytest.mark.parametrize("tracker", TRACKERS, ids=lambda tracker: tracker.name)
def test_a_tracker_is_public_and_on_its_pages(tracker):
    name = tracker.config.__name__
    assert name in fx.trackers.__all__
    assert f"| `{name}()` |" in (ROOT / "docs" / "tracking.md").read_text()
    assert f"`{name}`" in (ROOT / "docs" / "public_names.md").read_text()


LIBRARIES = [tracker for tracker in TRACKERS if tracker.package]


@pytest.mark.parametrize("tracker", LIBRARIES, ids=lambda tracker: tracker.name)
def test_a_library_has_an_extra_and_a_run_against_its_package(tracker):
    kind = kind_of(tracker.config)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (every,) = extras["trackers"]
    assert kind in extras and kind in every.partition("[")[2].rstrip("]").split(",")
    assert f"`{kind}`" in (ROOT / "docs" / "start" / "install.md").read_text()
    assert kind in CONFIGS and kind in READERS


def test_a_package_brings_a_tracker_by_entry_point(ctx, tmp_path, installed):
    kept, mine = own_tracker()
    entry = attrs.evolve(mine, config=Mine)
    installed(ENTRY, ROW=entry)
    assert trackers()[Mine] is entry
    with fx.track(tmp_path, ctx, [Mine()]) as run:
        run.log({"a": 1}, 1)
        assert run.native(Mine) is kept
    assert kept == [(1, {"a": 1.0})]


def test_kinds_are_names_of_trackers(ctx, tmp_path, installed):
    kept, mine = own_tracker()
    installed(ENTRY, ROW=attrs.evolve(mine, config=Mine))
    with fx.track(tmp_path, ctx, ["json_lines", "mine"]) as run:
        run.log({"a": 1}, 1)
        assert run.native(Mine) is kept
    assert kept == [(1, {"a": 1.0})] and read_run(tmp_path).curve("a") == [(1, 1.0)]


def test_all_are_the_trackers_whose_packages_are_installed(ctx, tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb").mkdir()  # what an earlier run of wandb left where the script starts
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    packages = {
        fx.JsonLines: "",
        fx.trackers.Aim: "torch",
        fx.WandB: "wandb",
        fx.trackers.Comet: "no_such_package",
    }
    rows = [
        attrs.evolve(own_tracker()[1], config=config, package=package)
        for config, package in packages.items()
    ]
    monkeypatch.setattr("fxtrain.trackers.opening.TRACKERS", rows)
    with fx.track("run", ctx, "all") as run:
        assert run.native(fx.JsonLines) == run.native(fx.trackers.Aim) == []
        for config in (fx.WandB, fx.trackers.Comet):
            assert run.native(config) is None


@pytest.mark.parametrize(
    ("config", "name", "call"),
    [
        (fx.WandB(project="p", init={"notes": "n", "settings": {"x": 1}}), "wandb", "init"),
        (Trackio(init={"private": True}), "trackio", "init"),
        (SwanLab(init={"description": "d", "project": "other"}), "swanlab", "init"),
        (Aim(init={"log_system_params": True}), "aim", "Run"),
        (DVCLive(init={"report": "md"}), "dvclive", "Live"),
        (Comet(init={"log_code": True}), "comet_ml", "ExperimentConfig"),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_arguments_of_the_library_reach_it(ctx, tmp_path, monkeypatch, config, name, call):
    library = Mock()
    monkeypatch.setitem(sys.modules, name, library)
    with fx.track(tmp_path / "run", ctx, [config]):
        pass
    passed = getattr(library, call).call_args.kwargs
    assert config.init.items() <= passed.items()
    if name == "trackio":
        assert passed["project"] == tmp_path.name


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("text", "found str"),
        (attrs.evolve(own_tracker()[1], config=fx.JsonLines), "second tracker for JsonLines"),
        (own_tracker()[1], r"has no config, by which fx.track finds it. Set Tracker\(config=...\)"),
    ],
    ids=["text", "twice", "without config"],
)
def test_a_wrong_entry_point_is_named(installed, entry, words):
    installed(ENTRY, ROW=entry)
    with pytest.raises(fx.PlanError, match=words):
        trackers()


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("tensorbord", r"Did you mean fx.TensorBoard\(...\)"),
        (["tensorbord"], r"Did you mean fx.TensorBoard\(...\)"),
        ([fx.WandB], r"Did you mean fx.WandB\(...\)"),
        ("jsonlines", r"Did you mean fx.JsonLines\(...\)"),
        ([Mine()], "no tracker is registered for Mine"),
        ([3], "no tracker is registered for 3"),
    ],
)
def test_an_unknown_tracker_is_named_with_the_nearest(ctx, tmp_path, to, words):
    with pytest.raises(fx.PlanError, match=words):
        fx.track(tmp_path / "run", ctx, to)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tracker", LIBRARIES, ids=lambda tracker: tracker.name)
def test_a_package_that_is_missing_is_named_with_its_extra(ctx, tmp_path, monkeypatch, tracker):
    find = importlib.import_module

    def missing(name):
        if not name.startswith("fxtrain"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return find(name)

    monkeypatch.setattr("fxtrain._optional.importlib.import_module", missing)
    name, extra = tracker.config.__name__, kind_of(tracker.config)
    words = rf"^fx\.(trackers\.)?{name}\(.*pip install 'fxtrain\[{extra}\]'"
    with pytest.raises(fx.errors.MissingPackageError, match=words):
        fx.track(tmp_path, ctx, [tracker.config()])


def test_configs_are_values_that_files_hold():
    config = fx.WandB(project="p", mode="offline")
    assert fx.state.loads(fx.state.dumps(config), fx.WandB) == config and hash(config)
    with raises_code("FX200", "'ofline'", "online"):
        fx.WandB(project="p", mode="ofline")
    own = fx.WandB(init={"notes": "n", "settings": {"api_key": "secret"}})
    assert fx.state.loads(fx.state.dumps(own), fx.WandB) == own and hash(own) == hash(fx.WandB())
    assert "secret" not in repr(own)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": 3}, "a path is a string"),
        ({"path": "s3://bucket/run"}, "local files"),
        ({"ranks": "some"}, "'main' or 'all'"),
        ({"position": 3}, "where the run resumes"),
        ({"resume": "folder"}, "where the run resumes"),
        ({"resume": "yes", "position": fx.Position()}, "found 'yes'"),
        ({"resume": {"id": "x"}, "position": fx.Position()}, "value of run.state()"),
        ({"resume": {"id": "0" * 32, "identities": 3}, "position": fx.Position()}, "identities"),
    ],
)
def test_arguments_that_make_no_sense_are_named(ctx, tmp_path, given, words):
    path = given.pop("path", tmp_path / "run")
    with pytest.raises(fx.PlanError, match=words):
        fx.track(path, ctx, **given)


def test_a_folder_that_cannot_be_made_is_named(ctx, tmp_path):
    (tmp_path / "file").write_text("")
    with raises_code("FX200", "file"):
        fx.track(tmp_path / "file" / "run", ctx)


def test_lines_that_are_damaged_are_counted(ctx, tmp_path):
    with fx.track(tmp_path, ctx) as run:
        run.log({"a": 1}, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('nothing\n[1]\n{"step": "x"}\n')
    log = read_run(tmp_path)
    assert log.curve("a") == [(1, 1.0)] and log.damaged == 3
    json.loads((tmp_path / "run.json").read_text())


def test_a_file_where_the_folder_should_be(ctx, tmp_path):
    path = tmp_path / "run"
    path.write_text("")
    with raises_code("FX200", "File exists", "run'"):
        fx.track(path, ctx)
