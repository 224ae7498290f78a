"""Files of tokens: those that are damaged, replaced or read by workers."""

import struct

import numpy as np
import pytest

import fxtrain as fx
from tests._errors import raises_code
from tests.data._loaders import world
from tests.data._token_files import write_megatron, write_nanogpt


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _lie(path):
    """Many more sequences than the file has bytes for."""
    data = bytearray(path.read_bytes())
    data[18:26] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)


def _shift_bounds(path):
    path.write_bytes(path.read_bytes()[:-24] + struct.pack("<3q", 1, 1, 2))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.idx", _cut, "need"),
        ("a.idx", _lie, "need"),
        ("a.idx", lambda path: path.write_bytes(b"x" * 80), "not an index"),
        ("a.idx", lambda path: path.write_bytes(b"MMID"), "fewer than its header"),
        ("a.idx", lambda path: path.unlink(), "cannot read"),
        ("a.idx", _shift_bounds, "documents from sequence 1"),
        ("a.bin", _cut, "no number of"),
        ("a.bin", lambda path: path.write_bytes(b"1234"), "not those of its .bin"),
        ("a.bin", lambda path: path.write_bytes(b""), "is empty"),
    ],
)
def test_damaged_files_are_errors(tmp_path, name, damage, message):
    source = write_megatron(tmp_path, [[1, 2, 3], [4, 5]])
    damage(tmp_path / name)
    with pytest.raises(fx.errors.DataError, match=message):
        fx.tokens(source, world(1)[0], length=2, batch_size=1)


@pytest.mark.parametrize("bounds", [(0, 7, 1, 3), (0, -1, 1, 3)])
def test_documents_of_no_sequence_are_errors(tmp_path, bounds):
    source = write_megatron(tmp_path, [[1, 2], [3, 4], [5, 6]])
    path = tmp_path / "a.idx"
    path.write_bytes(path.read_bytes()[:-32] + struct.pack("<4q", *bounds))
    with raises_code("FX400", "a.idx"):
        list(fx.tokens(source, world(1)[0], length=6, batch_size=1, documents=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"length": 0},
        {"batch_size": 0},
        {"workers": -1},
        {"packing": True},
        {"compatible": "nanogpt"},
        {"source": "a.bin"},
    ],
)
def test_wrong_arguments_are_errors(tmp_path, wrong):
    given = {"source": write_nanogpt(tmp_path, [[1]]), "length": 1, "batch_size": 1, **wrong}
    with raises_code("FX400", next(iter(wrong))):
        fx.tokens(given.pop("source"), world(1)[0], **given)


@pytest.mark.parametrize("apart", [{"documents": True}, {"packing": fx.data.BestFit()}])
def test_documents_without_an_end_are_not_kept_apart(tmp_path, apart):
    path = write_nanogpt(tmp_path, [[1, 2], [3]]).path
    with raises_code("FX400", "NanoGPTTokens(end=...)"):
        fx.tokens(fx.data.NanoGPTTokens(path=path), world(1)[0], length=2, batch_size=1, **apart)


def test_the_path_of_one_of_both_files_is_an_error(tmp_path):
    path = write_megatron(tmp_path, [[1, 2, 3]]).path
    source = fx.data.MegatronTokens(path=f"{path}.bin")
    with raises_code("FX400", f"path={path!r}"):
        fx.tokens(source, world(1)[0], length=2, batch_size=1)


def _all(source, **settings):
    (ctx,) = world(1)
    loader = fx.tokens(source, ctx, length=2, batch_size=2, shuffle=False, **settings)
    return [row for batch in loader for row in batch.data["tokens"][batch.valid].tolist()]


def test_a_tokens_file_replaced_alone_is_read_anew(tmp_path):
    source = write_megatron(tmp_path, [[1, 2, 3], [4]])
    assert _all(source) == [[1, 2], [3, 4]]
    (tmp_path / "b").write_bytes(struct.pack("<4H", 5, 6, 7, 8))
    (tmp_path / "b").rename(tmp_path / "a.bin")
    assert _all(source) == [[5, 6], [7, 8]]


def test_a_folder_replaced_while_it_is_read_is_an_error(tmp_path):
    for number in range(40):  # more files than are open at a time
        np.save(tmp_path / f"{number:02d}.npy", np.full(2, number, "u2"))
    (ctx,), source = world(1), fx.data.NumPyTokens(path=str(tmp_path))
    batches = iter(fx.tokens(source, ctx, length=2, batch_size=1, shuffle=False))
    first = next(batches).data["tokens"].tolist()
    for number in range(40):
        np.save(tmp_path / "new", np.full(2, number + 100, "u2"))
        (tmp_path / "new.npy").rename(tmp_path / f"{number:02d}.npy")
    with raises_code("FX400", "fx.tokens"):
        list(batches)
    assert (first, _all(source)[0]) == ([[0, 0]], [100, 100])


def test_the_end_of_documents_is_a_token_of_the_file():
    with raises_code("FX200", "uint16", "65535"):
        fx.data.NanoGPTTokens(path="a.bin", end=65536)
    for dtype, end in (("uint16", 65535), ("int32", 2**31 - 1), ("uint32", 2**32 - 1)):
        assert fx.data.NanoGPTTokens(path="a.bin", dtype=dtype, end=end).end == end


@pytest.mark.parametrize("number", [0, 1, 2])
def test_pointers_that_do_not_follow_each_other_are_errors(tmp_path, number):
    source = write_megatron(tmp_path, [[1, 2], [3, 4], [5, 6]])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", data, 34 + 3 * 4 + 8 * number, 2)
    (tmp_path / "a.idx").write_bytes(data)
    with raises_code("FX400", "a.idx"):
        fx.tokens(source, world(1)[0], length=2, batch_size=1)


def test_a_row_of_the_dataset(tmp_path):
    loader = fx.tokens(write_megatron(tmp_path, [[1, 2, 3]]), world(1)[0], length=2, batch_size=1)
    row = loader.dataset[1]
    assert row["tokens"].tolist() == [3, 0] and row["labels"].tolist() == [-100, -100]
