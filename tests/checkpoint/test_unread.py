"""What cannot be read, or is newer, is not damaged: nothing older is taken in its place."""

import copy
import errno
import json
import os

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import before
from fxtrain.checkpoint.manifest import MANIFEST, digest_of
from fxtrain.cli import main
from tests._errors import raises_code

DATA = "rank-00000.safetensors"


def _save(ctx, folder, *updates, **more):
    model = fx.wrap(nn.Linear(2, 2), ctx)
    for update in updates:
        fx.save(folder, ctx, model, position=fx.Position(updates=update), **more)


def _restore(ctx, path):
    return fx.restore(path, ctx, fx.wrap(nn.Linear(2, 2), ctx))


READERS = {
    "latest": lambda ctx, folder, path, out: fx.latest(folder),
    "before": lambda ctx, folder, path, out: before(folder, 9),
    "verify the folder": lambda ctx, folder, path, out: fx.checkpoint.verify(folder),
    "verify": lambda ctx, folder, path, out: fx.checkpoint.verify(path),
    "restore the folder": lambda ctx, folder, path, out: _restore(ctx, folder),
    "restore": lambda ctx, folder, path, out: _restore(ctx, path),
    "merge the folder": lambda ctx, folder, path, out: fx.checkpoint.merge(folder, out),
    "merge": lambda ctx, folder, path, out: fx.checkpoint.merge(path, out),
    "compare": lambda ctx, folder, path, out: list(fx.checkpoint.compare(path, path)),
    "save": lambda ctx, folder, path, out: _save(ctx, folder, 3, keep_last=1),
}
# Looks at the sizes of data files, not into them.
SIZES_ONLY = {"latest", "before", "save"}
COMMANDS = {
    "verify": lambda folder, path, out: ["verify", path],
    "verify the folder": lambda folder, path, out: ["verify", folder],
    "merge-weights": lambda folder, path, out: ["merge-weights", path, out],
}


def _fail(monkeypatch, name, code):
    """The system fails to open what is called so."""
    inner_open, inner_scandir = os.open, os.scandir

    def refuse(path):
        if not isinstance(path, int) and os.path.basename(os.fspath(path)) == name:
            raise OSError(code, os.strerror(code), path)

    def open_or_fail(path, *more, **named):
        refuse(path)
        return inner_open(path, *more, **named)

    def scandir_or_fail(path):
        refuse(path)
        return inner_scandir(path)

    monkeypatch.setattr(os, "open", open_or_fail)
    monkeypatch.setattr(os, "scandir", scandir_or_fail)


CODES = [errno.EACCES, errno.EMFILE]


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("name", ["update-0000000002", MANIFEST, DATA])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_what_cannot_be_read_is_an_error(ctx, what, name, code, tmp_path, monkeypatch):
    folder, path = str(tmp_path / "run"), str(tmp_path / "run" / "update-0000000002")
    _save(ctx, folder, 1, 2)
    args = (ctx, folder, path, str(tmp_path / "out"))
    with monkeypatch.context() as patch:
        _fail(patch, name, code)
        if name == DATA and what in SIZES_ONLY:
            READERS[what](*args)
            return
        with pytest.raises(fx.CheckpointError) as caught:
            READERS[what](*args)
    said = str(caught.value)
    assert os.strerror(code) in said and name in said and "damaged" not in said
    assert sorted(os.listdir(folder)) == ["update-0000000001", "update-0000000002"]
    assert fx.checkpoint.verify(folder).path == path


@pytest.mark.parametrize("what", ["verify", "restore", "merge"])
def test_a_disk_that_fails_under_the_reader_is_an_error(ctx, what, tmp_path, failing):
    folder, path = str(tmp_path / "run"), str(tmp_path / "run" / "update-0000000002")
    _save(ctx, folder, 2)
    failing(os, "preadv", errno.EIO)
    with raises_code("FX607", "Input/output") as caught:
        READERS[what](ctx, folder, path, str(tmp_path / "out"))
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("what", COMMANDS)
@pytest.mark.parametrize("name", ["update-0000000002", MANIFEST, DATA])
def test_the_command_line_says_so_without_a_traceback(
    ctx, what, name, tmp_path, monkeypatch, capsys
):
    folder, path = str(tmp_path / "run"), str(tmp_path / "run" / "update-0000000002")
    _save(ctx, folder, 2)
    _fail(monkeypatch, name, errno.EACCES)
    assert main(COMMANDS[what](folder, path, str(tmp_path / "out"))) == 2
    said = capsys.readouterr().err
    assert "Permission denied" in said and "damaged" not in said and "Traceback" not in said


@pytest.mark.parametrize("path", ["file", "file/inside", "\0", "x" * 300, 5, b"x", None])
@pytest.mark.parametrize("what", ["latest", "verify", "restore", "merge", "save"])
def test_a_path_that_is_none(ctx, path, what, tmp_path):
    (tmp_path / "file").touch()
    if isinstance(path, str) and path.startswith("file"):
        path = str(tmp_path / path)
    with pytest.raises(fx.CheckpointError):
        READERS[what](ctx, path, path, str(tmp_path / "out"))


def test_a_file_in_place_of_a_checkpoint_is_named(ctx, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({}, path)
    with raises_code("FX601"):
        fx.restore(path, ctx, fx.wrap(torch.nn.Linear(1, 1), ctx))


def _rewrite(path, change):
    file = os.path.join(path, MANIFEST)
    with open(file, "rb") as stream:
        body = copy.deepcopy(json.loads(stream.read())["manifest"])
    change(body)
    raw = json.dumps(body).encode()
    with open(file, "wb") as stream:
        stream.write(b'{"digest":"' + digest_of(raw).encode() + b'","manifest":' + raw + b"}\n")


NEWER = {
    "the same keys": lambda body: body.update(format=2),
    "one more key": lambda body: body.update(format=2, compression="zstd"),
    "one key less": lambda body: (body.update(format=3), body.pop("tensors")),
    "nothing else": lambda body: (body.clear(), body.update(format=1 << 70)),
}


@pytest.mark.parametrize("change", NEWER)
@pytest.mark.parametrize("what", READERS)
def test_a_newer_format_stops_and_nothing_older_is_taken(ctx, what, change, tmp_path):
    folder, path = str(tmp_path / "run"), str(tmp_path / "run" / "update-0000000002")
    _save(ctx, folder, 1, 2)
    _rewrite(path, NEWER[change])
    with raises_code("FX604") as caught:
        READERS[what](ctx, folder, path, str(tmp_path / "out"))
    said = str(caught.value)
    assert path in said and "this version reads 1" in said and "Update fxtrain" in said
    assert sorted(os.listdir(folder)) == ["update-0000000001", "update-0000000002"]
    assert _restore(ctx, f"{folder}/update-0000000001").position.updates == 1


@pytest.mark.parametrize("change", [0, -1, True, None, "2", 1.5, [2]], ids=repr)
def test_a_format_that_is_none_is_damage(ctx, change, tmp_path):
    _save(ctx, tmp_path, 1, 2)
    _rewrite(tmp_path / "update-0000000002", lambda body: body.update(format=change))
    assert fx.latest(tmp_path) == str(tmp_path / "update-0000000001")


def test_the_command_line_names_a_newer_format(ctx, tmp_path, capsys):
    _save(ctx, tmp_path, 2)
    _rewrite(tmp_path / "update-0000000002", NEWER["one more key"])
    assert main(["verify", str(tmp_path)]) == 2
    assert "Update fxtrain" in capsys.readouterr().err


@pytest.mark.parametrize(
    "topology", [{"order": "1"}, {"order": 1.0}, {"saver": {}}, {"saver": 3}], ids=repr
)
def test_an_order_or_saver_that_is_none_is_damage(ctx, topology, tmp_path):
    _save(ctx, tmp_path, 1, 2)
    _rewrite(tmp_path / "update-0000000002", lambda body: body["topology"].update(topology))
    assert fx.latest(tmp_path) == str(tmp_path / "update-0000000001")


# What fsspec reaches


class Refused(Exception):
    """As a client of an object store raises it."""


@pytest.mark.parametrize("error", [Refused("403"), PermissionError(13, "no"), TimeoutError("slow")])
@pytest.mark.parametrize("method", ["info", "ls", "cat_file"])
def test_a_store_that_fails_is_not_an_empty_one(ctx, method, error, monkeypatch):
    import fsspec

    name = f"{method}-{type(error).__name__}"  # all tests of a process share this file system
    url = f"memory://{name}"
    _save(ctx, url, 1, 2)
    system = fsspec.filesystem("memory")

    def fail(*args, **more):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(system, method, fail)
        for read in (fx.latest, fx.checkpoint.verify, lambda url: _restore(ctx, url)):
            with raises_code("FX607"):
                read(url)
        with raises_code("FX607"):
            _save(ctx, url, 3, keep_last=1)
    assert fx.checkpoint.verify(url).path == f"{url}/update-0000000002"
    _save(ctx, url, 3, keep_last=1)
    names = [one.rpartition("/")[2] for one in system.ls(f"/{name}", detail=False)]
    assert names == ["update-0000000003"]
