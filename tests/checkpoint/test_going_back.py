"""Runs that go back: after any history what was saved is there, and the newest is restored."""

import json
import os
import shutil
import stat
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import folders, manifest
from fxtrain.checkpoint.folders import CheckpointInfo, to_prune
from fxtrain.checkpoint.manifest import MANIFEST, digest_of

DATA = "rank-00000.safetensors"
KEEP = st.one_of(st.none(), st.integers(1, 3))
STEPS = st.one_of(
    st.tuples(st.just("save"), st.integers(0, 9), KEEP),
    st.tuples(st.just("save"), st.integers(0, 9), KEEP),
    st.tuples(st.just("damage"), st.sampled_from(["cut", "missing", "manifest", "no manifest"])),
    st.tuples(st.just("flip"), st.just(0)),
    st.tuples(st.just("go back"), st.integers(0, 5)),
    st.tuples(st.just("resume"), st.just(0)),
)


def _damage(path, how):
    if how == "cut":
        os.truncate(os.path.join(path, DATA), 100)
    elif how == "missing":
        os.remove(os.path.join(path, DATA))
    elif how == "no manifest":
        os.remove(os.path.join(path, MANIFEST))
    else:
        _flip(os.path.join(path, MANIFEST), 100)


def _flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def _rewrite(path, change):
    file = os.path.join(path, MANIFEST)
    with open(file, "rb") as stream:
        body = json.loads(stream.read())["manifest"]
    change(body)
    raw = json.dumps(body).encode()
    with open(file, "wb") as stream:
        stream.write(b'{"digest":"' + digest_of(raw).encode() + b'","manifest":' + raw + b"}\n")


class History:
    """A folder, the run that saves into it, and what must be there."""

    def __init__(self, ctx, folder):
        self.ctx, self.folder = ctx, folder
        self.model = fx.wrap(nn.Linear(1, 1), ctx)
        self.order = []  # whole checkpoints, by commit
        self.flipped = set()  # of these, damaged where only `verify` looks
        self.base = None  # what was restored from
        self.value = {}

    def save(self, update, keep):
        with torch.no_grad():
            self.model.module.weight.fill_(len(self.value) + 1)
        position = fx.Position(updates=update)
        saving = fx.save(self.folder, self.ctx, self.model, position=position, keep_last=keep)
        self.value[saving.result()] = len(self.value) + 1
        self.order.append(saving.path)
        self._check_kept(update, keep)
        self.order = [path for path in self.order if os.path.exists(path)]
        self.flipped &= set(self.order)
        fx.checkpoint.verify(saving.path)
        assert fx.latest(self.folder) == saving.path

    def _check_kept(self, update, keep):
        """The rule, written down once more."""
        newest = {}
        for path in self.order:
            newest[path.rpartition("/")[2].partition(".")[0]] = path
        kept = [path for path in self.order if path in newest.values()]
        wanted = set(kept if keep is None else kept[-keep:])
        if self.base is not None and self.base in self.order:
            wanted.add(self.base)
        found = {os.path.join(self.folder, name) for name in os.listdir(self.folder)}
        damaged = found - set(self.order)
        assert found - damaged == wanted
        assert keep is None or damaged <= {self.base}

    def damage(self, how):
        if len(self.order) > 1:  # one stays whole
            _damage(self.order.pop(), how)
            self.flipped &= set(self.order)

    def flip(self, _):
        if len(set(self.order) - self.flipped) > 1:
            path = [path for path in self.order if path not in self.flipped][-1]
            _flip(os.path.join(path, DATA), os.path.getsize(os.path.join(path, DATA)) - 1)
            self.flipped.add(path)

    def go_back(self, index):
        """By hand, to any that verifies."""
        whole = [path for path in self.order if path not in self.flipped]
        if whole:
            path = whole[index % len(whole)]
            self._restored(fx.restore(path, self.ctx, self.model), path)

    def resume(self, _):
        """By the folder: the newest, or an error if only `verify` sees that it is damaged."""
        if self.order and self.order[-1] in self.flipped:
            with pytest.raises(fx.CheckpointError):
                fx.restore(self.folder, self.ctx, self.model)
        elif self.order:
            self._restored(fx.restore(self.folder, self.ctx, self.model), self.order[-1])

    def _restored(self, found, path):
        assert found.path == path
        assert self.model.module.weight.item() == self.value[path]
        self.base = path

    def check(self):
        assert fx.latest(self.folder) == (self.order[-1] if self.order else None)
        for path in self.order:
            if path not in self.flipped:
                fx.checkpoint.verify(path)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, min_size=2, max_size=12))
def test_after_any_history_what_must_be_there_is_there(steps):
    with fx.detect(env={}, device="cpu") as ctx, tempfile.TemporaryDirectory() as folder:
        history = History(ctx, os.path.realpath(folder))
        for what, *args in steps:
            getattr(history, what.replace(" ", "_"))(*args)
            history.check()


# Saving of bits that are damaged logs a warning at each look, which is right.


@pytest.fixture
def run(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        yield History(ctx, str(tmp_path))


def _names(folder):
    return [int(name.removeprefix("update-")) for name in sorted(os.listdir(folder))]


def test_a_run_that_lost_its_newest_keeps_what_it_saves_next(run, tmp_path):
    run.save(50, None)
    run.save(100, 2)
    run.damage("cut")
    run.resume(0)
    run.save(60, 1)
    assert _names(tmp_path) == [50, 60]
    run.save(70, 1)
    assert _names(tmp_path) == [50, 70]


def test_what_a_failed_restore_looked_at_is_not_kept(run, tmp_path):
    run.save(50, None)
    run.save(100, None)
    run.flip(0)
    run.resume(0)
    run.go_back(0)
    run.save(60, 1)
    assert _names(tmp_path) == [50, 60]


def test_a_checkpoint_is_kept_by_whatever_path_it_was_restored(run, tmp_path):
    run.save(50, None)
    os.symlink(tmp_path, f"{tmp_path}-link")
    fx.restore(f"{tmp_path}-link/update-0000000050", run.ctx, run.model)
    fx.save(tmp_path, run.ctx, run.model, position=fx.Position(updates=60), keep_last=1)
    assert _names(tmp_path) == [50, 60]


def test_a_checkpoint_that_a_save_removes_meanwhile_is_not_missed(run, tmp_path, monkeypatch):
    run.save(50, None)
    names = folders.checkpoint_names

    def slow(folder):
        monkeypatch.undo()
        found = names(folder)
        run.save(60, 1)
        return found

    monkeypatch.setattr(folders, "checkpoint_names", slow)
    assert fx.latest(tmp_path).endswith("update-0000000060")


def test_a_draft_that_a_save_renames_meanwhile_stops_no_reader(run, tmp_path, monkeypatch):
    run.save(50, None)
    drafts = [tmp_path / f".partial-update-0000000060-{number}" for number in range(3)]
    is_file = stat.S_ISREG
    for draft in drafts:
        draft.mkdir()

    def commit(mode):
        while drafts:
            drafts.pop().rmdir()
        return is_file(mode)

    monkeypatch.setattr(stat, "S_ISREG", commit)
    assert fx.restore(tmp_path, run.ctx, run.model).position.updates == 50


@pytest.mark.parametrize("call", ["latest", "restore", "save"])
def test_only_the_manifest_that_is_restored_is_parsed_whole(run, tmp_path, monkeypatch, call):
    for update in (10, 30, 20):
        run.save(update, None)
    checked, check = [], manifest._check_tensors
    monkeypatch.setattr(
        manifest, "_check_tensors", lambda each: checked.append(each) or check(each)
    )
    if call == "latest":
        assert fx.latest(tmp_path).endswith("update-0000000020")
    elif call == "restore":
        assert fx.restore(tmp_path, run.ctx, run.model).position.updates == 20
    else:
        fx.save(tmp_path, run.ctx, run.model, position=fx.Position(updates=40), keep_last=2)
    assert [each.position.updates for each in checked] == [20] * (call == "restore")


def test_a_manifest_whose_tensors_were_changed_is_damaged_for_the_next_save(run, tmp_path):
    for update in (10, 20, 30):
        run.save(update, None)
    path = tmp_path / "update-0000000010" / MANIFEST
    _flip(path, path.stat().st_size // 2)
    fx.save(tmp_path, run.ctx, run.model, position=fx.Position(updates=40), keep_last=4)
    assert _names(tmp_path) == [20, 30, 40]


def test_the_order_survives_a_copy_and_clocks_do_not_count(run, tmp_path):
    for update in (50, 90, 100, 60):
        run.save(update, None)
    for number, name in enumerate(sorted(os.listdir(tmp_path))):
        os.utime(tmp_path / name, (number * 1000, number * 1000))
    copy = shutil.copytree(tmp_path, f"{tmp_path}-copy")
    assert fx.latest(copy).endswith("update-0000000060")
    assert fx.checkpoint.before(copy, 95).endswith("update-0000000090")


def test_checkpoints_without_an_order_are_ordered_by_updates(run, tmp_path):
    import json

    from fxtrain.checkpoint.manifest import digest_of

    for update in (100, 50):
        run.save(update, None)
        path = tmp_path / f"update-{update:010d}" / MANIFEST
        body = json.loads(path.read_bytes())["manifest"]
        del body["topology"]["order"], body["topology"]["saver"]  # as earlier versions wrote it
        raw = json.dumps(body).encode()
        path.write_bytes(b'{"digest":"' + digest_of(raw).encode() + b'","manifest":' + raw + b"}\n")
    assert fx.latest(tmp_path).endswith("update-0000000100")
    run.save(60, None)


def test_the_highest_order_leaves_a_folder_that_can_be_saved_into(run, tmp_path):
    run.save(1, None)
    _rewrite(run.order[0], lambda body: body["topology"].update(order=1 << 63))
    run.save(2, None)


@settings(max_examples=120)
@given(
    orders=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    damaged=st.sets(st.integers(0, 7)),
    keep=st.fixed_dictionaries(
        {
            "keep_last": KEEP,
            "keep_every": KEEP,
            "keep_best": KEEP,
            "best": st.sampled_from(["min", "max"]),
        }
    ),
    data=st.data(),
)
def test_whatever_the_rule_the_new_one_and_as_many_as_asked_for_stay(orders, damaged, keep, data):
    found = [
        CheckpointInfo(
            name=f"update-{updates:010d}.{number}",
            order=number,
            metric=data.draw(st.sampled_from([None, 0.0, 1.0])),
            problems=("cut",) if number in damaged and number < len(orders) - 1 else (),
        )
        for number, updates in enumerate(orders)
    ]
    gone = to_prune(found, ("here", 1), **keep)
    assert found[-1].name not in gone and len(set(gone)) == len(gone)
    kept = {one.updates for one in found if one.name not in gone and not one.problems}
    whole = {one.updates for one in found if not one.problems}
    assert len(kept) >= min(keep["keep_last"] or 1, len(whole))
    if keep["keep_every"] is not None:
        assert kept >= {updates for updates in whole if updates % keep["keep_every"] == 0}
    if keep["keep_last"] is keep["keep_every"] is keep["keep_best"] is None:
        assert kept == whole
