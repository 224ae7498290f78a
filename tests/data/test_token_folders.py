"""Sources of several files: the rows of the same documents in Megatron's files; damaged files."""

import base64
import itertools
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from tests._errors import raises_code
from tests.data._loaders import world
from tests.data._token_files import write_megatron, write_nanogpt

DOCUMENTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5], [8], [9, 7, 9]]
NUMBERS = itertools.count()


def _groups(documents, parts):
    size = -(-len(documents) // parts)
    return [documents[at : at + size] for at in range(0, len(documents), size)]


def write_datatrove(folder, documents, parts=2):
    for number, group in enumerate(_groups(documents, parts)):
        path = folder / f"{number}.ds"
        np.array([token for d in group for token in d], "<u2").tofile(path)
        np.cumsum([len(d) for d in group]).astype("<u8").tofile(f"{path}.index")
        Path(f"{path}.metadata").write_text("gpt2|2\n17\n17 T")
    return fx.data.DatatroveTokens(path=str(folder))


def write_npy(folder, documents, parts=2):
    for number, document in enumerate(documents):
        np.save(folder / f"{number:03d}.npy", np.array(document, "u2"))
    return fx.data.NumPyTokens(path=str(folder))


def _mds_sample(document, encoding):
    values = np.array(document, "<u2").tobytes()
    shape = bytes([1 << 2, len(document)])  # one dimension, of type uint8
    head = {"ndarray:uint16": shape, "ndarray": bytes([16]) + shape, "bytes": b""}[encoding]
    column = head + values
    return struct.pack("<2I", len("text"), len(column)) + b"text" + struct.pack("<q", 7) + column


def write_mds(folder, documents, parts=2, encoding="ndarray:uint16"):
    """Shards with a column of text and one of numbers before the tokens."""
    shards = []
    for number, group in enumerate(_groups(documents, parts)):
        samples = [_mds_sample(document, encoding) for document in group]
        config, n = b"{}", len(samples)
        start = 4 + 4 * (n + 1) + len(config)
        offsets = [start + sum(map(len, samples[:at])) for at in range(n + 1)]
        data = struct.pack(f"<{n + 2}I", n, *offsets) + config + b"".join(samples)
        (folder / f"shard.{number:05d}.mds").write_bytes(data)
        shard = {
            "format": "mds",
            "compression": None,
            "samples": n,
            "column_names": ["a", "b", "tokens"],
            "column_encodings": ["str", "int", encoding],
            "column_sizes": [None, 8, None],
            "raw_data": {"basename": f"shard.{number:05d}.mds", "bytes": len(data)},
        }
        shards.append(shard)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return fx.data.MDSTokens(path=str(folder), dtype="uint16" if encoding == "bytes" else None)


def _column(kind):
    def write(folder, documents, parts=2):
        pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
        from pyarrow import parquet

        table, size = pyarrow.table({"input_ids": documents}), -(-len(documents) // parts)
        if kind == "parquet":
            parquet.write_table(table, folder / "a.parquet", row_group_size=size)
        else:
            make = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
            with make(str(folder / "a.arrow"), table.schema) as file:
                file.write_table(table, max_chunksize=size)
        return fx.data.ColumnTokens(path=str(folder))

    return write


WRITERS = {
    "datatrove": write_datatrove,
    "npy": write_npy,
    **{
        f"mds {encoding}": lambda *args, encoding=encoding: write_mds(*args, encoding=encoding)
        for encoding in ("ndarray:uint16", "ndarray", "bytes")
    },
    **{kind: _column(kind) for kind in ("parquet", "stream", "arrow")},
}


def _rows(source, **settings):
    loader = fx.tokens(source, world(1)[0], **{"documents": True, "batch_size": 3, **settings})
    return [{name: v.tolist() for name, v in batch.data.items()} for batch in loader]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=10)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    parts=st.integers(1, 4),
    length=st.integers(1, 12),
    packing=st.sampled_from([None, fx.data.BestFit(window_rows=2)]),
)
def test_rows_are_those_of_megatron_files(tmp_path_factory, name, sizes, parts, length, packing):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "own").mkdir()
    numbers = itertools.count(1)
    documents = [list(itertools.islice(numbers, size)) for size in sizes]
    source = WRITERS[name](folder / "own", documents, parts)
    settings = {"length": length, "packing": packing}
    assert _rows(source, **settings) == _rows(write_megatron(folder, documents), **settings)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _edit(old, new):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "file", "damage", "message"),
    [
        ("datatrove", "0.ds", _cut, "no number of"),
        ("datatrove", "0.ds.index", lambda p: p.write_bytes(struct.pack("<Q", 99)), "describes 99"),
        ("datatrove", "0.ds.metadata", lambda p: p.write_text("gpt2|4\n1"), "have '4' bytes"),
        ("npy", "000.npy", _cut, "needs others"),
        ("npy", "000.npy", _edit(b"(3,)", b"(9,)"), "needs others"),
        ("npy", "000.npy", lambda p: np.save(p, np.zeros(3)), "not integers"),
        ("npy", "000.npy", lambda p: p.write_bytes(b"x" * 99), "no header"),
        ("mds ndarray", "shard.00000.mds", _cut, "offsets that do not fit"),
        ("mds ndarray", "shard.00000.mds", _edit(b"\x03\0\0\0", b"\x09\0\0\0"), "not the 3"),
        ("mds ndarray", "index.json", _edit(b"shard.00000", b"../rd.00000"), "outside"),
        ("mds ndarray", "index.json", _edit(b'"tokens"', b'"tokenz"'), "no column"),
        ("mds ndarray", "index.json", _edit(b"null", b'"zstd"'), "compressed"),
        (
            "mds ndarray",
            "index.json",
            lambda p: p.write_text("[]"),
            "not what its header or index says",
        ),
        ("parquet", "a.parquet", _cut, "no Parquet file"),
        ("arrow", "a.arrow", lambda p: p.write_bytes(b"ARROW1\0\0" * 9), "no Arrow file"),
    ],
)
def test_damaged_files_are_errors(tmp_path, name, file, damage, message):
    source = WRITERS[name](tmp_path, DOCUMENTS)
    damage(tmp_path / file)
    with pytest.raises(fx.errors.DataError, match=message):
        _rows(source, length=4)


@pytest.mark.parametrize("name", [*WRITERS, "megatron", "nanogpt"])
def test_pipes_are_refused_before_they_are_opened(tmp_path, name):
    write = {**WRITERS, "megatron": write_megatron, "nanogpt": write_nanogpt}[name]
    write(tmp_path, DOCUMENTS)
    for file in [file.name for file in tmp_path.iterdir() if file.is_file()]:
        folder = tmp_path / f"{file}.folder"  # of its own: open files are kept
        folder.mkdir()
        source = write(folder, DOCUMENTS)
        (folder / file).unlink()
        os.mkfifo(folder / file)
        with raises_code("FX400", "pipe", file) as caught:
            _rows(source, length=4)
        assert file in str(caught.value)


# Parquet is decoded before rows are read.
@pytest.mark.parametrize("name", [*sorted(WRITERS.keys() - {"parquet"}), "megatron", "nanogpt"])
@pytest.mark.parametrize("packing", [None, fx.data.BestFit(window_rows=2)])
def test_a_file_that_is_truncated_while_it_is_read_is_an_error(tmp_path, name, packing):
    own = {"megatron": write_megatron, "nanogpt": write_nanogpt}
    documents = [[token % 250 for token in range(100)] for _ in range(200)]
    source = {**WRITERS, **own}[name](tmp_path, documents, *(() if name in own else (1,)))
    settings = {"length": 10, "batch_size": 4, "packing": packing, "shuffle": False}
    batches = iter(fx.tokens(source, world(1)[0], **settings))
    next(batches)
    for file in sorted(tmp_path.iterdir()):
        os.truncate(file, 1)
    with raises_code("FX400"):
        list(batches)


def test_a_folder_without_files_is_an_error(tmp_path):
    with raises_code("FX400", "*.ds"):
        _rows(fx.data.DatatroveTokens(path=str(tmp_path)), length=4)


# What datatrove 0.10.1 and mosaicml-streaming 0.13.0 wrote of [1, 2, 3], [4, 5], [70000, 6, 7, 8];
# datatrove's file has an empty document after the first one.
WRITTEN = {
    "t.ds": "AQAAAAIAAAADAAAABAAAAAUAAABwEQEABgAAAAcAAAAIAAAA",
    "t.ds.index": "AwAAAAAAAAADAAAAAAAAAAUAAAAAAAAACQAAAAAAAAA=",
    "shard.00000.mds": (
        "AwAAAMkAAADbAAAA6QAAAP8AAAB7ImNvbHVtbl9lbmNvZGluZ3MiOiBbIm5kYXJyYXk6dWludDMyIl0sICJjb2x1"
        "bW5fbmFtZXMiOiBbInRva2VucyJdLCAiY29sdW1uX3NpemVzIjogW251bGxdLCAiY29tcHJlc3Npb24iOiBudWxs"
        "LCAiZm9ybWF0IjogIm1kcyIsICJoYXNoZXMiOiBbXSwgInNpemVfbGltaXQiOiAxMDQ4NTc2LCAidmVyc2lvbiI6"
        "IDJ9DgAAAAQDAQAAAAIAAAADAAAACgAAAAQCBAAAAAUAAAASAAAABARwEQEABgAAAAcAAAAIAAAA"
    ),
}
INDEX = {
    "column_encodings": ["ndarray:uint32"], "column_names": ["tokens"], "column_sizes": [None],
    "compression": None, "format": "mds", "hashes": [],
    "raw_data": {"basename": "shard.00000.mds", "bytes": 255, "hashes": {}},
    "samples": 3, "size_limit": 1048576, "version": 2, "zip_data": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ["datatrove", "mds"])
def test_files_of_the_packages_themselves_are_read(tmp_path, name):
    for file, text in WRITTEN.items():
        (tmp_path / file).write_bytes(base64.b64decode(text))
    (tmp_path / "index.json").write_text(json.dumps({"shards": [INDEX], "version": 2}))
    path = str(tmp_path)
    source = {
        "datatrove": fx.data.DatatroveTokens(path=f"{path}/t.ds", dtype="uint32"),
        "mds": fx.data.MDSTokens(path=path),
    }[name]
    with fx.detect({}, device="cpu") as ctx:
        (batch,) = fx.tokens(source, ctx, length=9, batch_size=1, documents=True)
    assert batch.data["tokens"].tolist() == [[1, 2, 3, 4, 5, 70000, 6, 7, 8]]
    assert batch.data["labels"].tolist() == [[2, 3, -100, 5, -100, 6, 7, 8, -100]]


@pytest.fixture
def source(tmp_path):
    return write_megatron(tmp_path, [[*range(size)] for size in (5, 9, 2, 7)])


def _rows_order(source, **settings):
    (ctx,) = world(1)
    settings = {"length": 4, "batch_size": 2, **settings}
    loader = fx.tokens(source, ctx, fx.Plan(seed=1), **settings)
    return [row for batch in loader for row in batch.data["tokens"][batch.valid].tolist()]


def test_an_epoch_has_every_whole_row_once(source):
    assert len(_rows_order(source, compatible="megatron", shuffle=False)) == (23 - 1) // 4
    assert _rows_order(source, compatible=fx.data.MegatronOrder()) == _rows_order(
        source, compatible="megatron"
    )


def test_rows_end_with_the_samples_of_the_run(source):
    many = _rows_order(source, compatible=fx.data.MegatronOrder(samples=40))
    assert len(many) == 40
    # Epochs are shuffled together, so that fewer samples are not the first of more.
    assert many[:5] != _rows_order(source, compatible=fx.data.MegatronOrder(samples=5))


def test_what_megatron_does_not_have_is_refused(source, tmp_path):
    part = fx.data.BlendPart(name="a", source=source)
    growing = fx.data.BlendPart(name="b", source=source, weight=((0, 1.0), (9, 2.0)))
    order = fx.data.MegatronOrder(samples=9)
    other = write_nanogpt(tmp_path, [[1, 2, 3]], name="other")
    for wrong, how, message in (
        (other, {}, "that of its own files"),
        (source, {"packing": fx.data.BestFit()}, "no best-fit packing"),
        (source, {"length": 30}, "fewer than a row of 30"),
        (fx.data.Blend(parts=[part]), {"compatible": "megatron"}, "a number of samples"),
        (fx.data.Blend(parts=[part, growing]), {}, "constant weights above 0"),
    ):
        with pytest.raises(fx.errors.DataError, match=message):
            _rows_order(wrong, **{"compatible": order, **how})
    empty = fx.data.MegatronOrder(split=(1.0, 0.0), part="valid")
    with raises_code("FX400", "0 sequences"):
        _rows_order(source, compatible=empty)
    for split in ((), (1.0,) * 4, (-1.0, 2.0), (0.0, 0.0)):
        with raises_code("FX200", "split"):
            fx.data.MegatronOrder(split=split)
