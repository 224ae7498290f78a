"""Rows of tokens, against rows computed from lists of documents."""

import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from tests.data._loaders import world

DOCUMENTS = st.lists(st.lists(st.integers(1, 60000), max_size=9), min_size=1, max_size=9).filter(
    any
)


def write_megatron(folder, documents):
    """Files as Megatron writes them, with one sequence for each document."""
    itemsize, sizes = 2, [len(document) for document in documents]
    flat = [token for document in documents for token in document]
    (folder / "a.bin").write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    n, starts = len(sizes), [itemsize * sum(sizes[:i]) for i in range(len(sizes))]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n, n + 1)
    index = struct.pack(f"<{n}i{n}q{n + 1}q", *sizes, *starts, *range(n + 1))
    (folder / "a.idx").write_bytes(head + index)
    return fx.MegatronTokens(path=str(folder / "a"))


def write_nanogpt(folder, documents):
    flat = [token for document in documents for token in (*document, 0)]
    (folder / "a").write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    return fx.NanoGPTTokens(path=str(folder / "a"), end=0)


def expected_rows(documents, length):
    """Each row as a list of (token, label, position, document)."""
    flat = [(t, d, i) for d, doc in enumerate(documents) for i, t in enumerate(doc)]
    rows = []
    for start in range(0, len(flat), length):
        row, number, position = [], -1, 0
        for at in range(start, min(start + length, len(flat))):
            token, document, _ = flat[at]
            new = at == start or flat[at - 1][1] != document
            number, position = number + new, 0 if new else position + 1
            follows = at + 1 < len(flat) and flat[at + 1][1] == document
            row.append((token, flat[at + 1][0] if follows else -100, position, number))
        rows.append(row + [(0, -100, 0, -1)] * (length - len(row)))
    return rows


def found_rows(batch):
    columns = [batch.data[name] for name in ("tokens", "labels", "positions", "documents")]
    return torch.stack(columns, -1)[batch.valid].tolist()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(documents=DOCUMENTS, length=st.integers(1, 12), n=st.integers(1, 3), megatron=st.booleans())
def test_every_row_comes_once_on_any_number_of_ranks(tmp_path, documents, length, n, megatron):
    source = (write_megatron if megatron else write_nanogpt)(tmp_path, documents)
    if not megatron:
        documents = [[*document, 0] for document in documents]
    # Files are rewritten within the resolution of their time of change.
    os.utime(tmp_path / ("a.idx" if megatron else "a"), ns=(0, next(TIMES)))
    found = [
        row
        for ctx in world(n)
        for batch in fx.tokens(source, ctx, length=length, batch_size=2)
        for row in found_rows(batch)
    ]
    expected = [[list(entry) for entry in row] for row in expected_rows(documents, length)]
    assert sorted(found) == sorted(expected)


TIMES = iter(range(1, 10**6))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_loader_resumes_at_another_world_size(tmp_path, ranks):
    source = write_megatron(tmp_path, [list(range(1, 50)), list(range(50, 97))])
    plan = fx.Plan(batch="global", seed=3)
    (ctx,) = world(1)
    whole = [found_rows(b) for b in fx.tokens(source, ctx, plan, length=4, batch_size=4)]
    first = next(iter(fx.tokens(source, ctx, plan, length=4, batch_size=4)))
    parts = [
        [
            found_rows(b)
            for b in fx.tokens(source, c, plan, length=4, batch_size=4).at(first.position)
        ]
        for c in world(ranks)
    ]
    assert [[row for part in batch for row in part] for batch in zip(*parts, strict=True)] == whole[
        1:
    ]


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _lie(path):
    """Many more sequences than the file has bytes for."""
    data = bytearray(path.read_bytes())
    data[18:26] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.idx", _cut, "need"),
        ("a.idx", _lie, "need"),
        ("a.idx", lambda path: path.write_bytes(b"x" * 80), "not an index"),
        ("a.idx", lambda path: path.write_bytes(b"MMID"), "fewer than its header"),
        ("a.idx", lambda path: path.unlink(), "cannot read"),
        ("a.bin", _cut, "no number of"),
        ("a.bin", lambda path: path.write_bytes(b"1234"), "not those of its .bin"),
        ("a.bin", lambda path: path.write_bytes(b""), "is empty"),
    ],
)
def test_damaged_files_are_errors(tmp_path, name, damage, message):
    source = write_megatron(tmp_path, [[1, 2, 3], [4, 5]])
    damage(tmp_path / name)
    with pytest.raises(fx.DataError, match=message):
        fx.tokens(source, world(1)[0], length=2, batch_size=1)


@pytest.mark.parametrize("bounds", [(0, 7, 1, 3), (0, -1, 1, 3)])
def test_documents_of_no_sequence_are_errors(tmp_path, bounds):
    source = write_megatron(tmp_path, [[1, 2], [3, 4], [5, 6]])
    path = tmp_path / "a.idx"
    path.write_bytes(path.read_bytes()[:-32] + struct.pack("<4q", *bounds))
    with pytest.raises(
        fx.DataError,
        match=r"a\.idx (has documents that are not in order|starts document \d at sequence)",
    ):
        list(fx.tokens(source, world(1)[0], length=6, batch_size=1))


@pytest.mark.parametrize("wrong", [{"length": 0}, {"batch_size": 0}, {"source": "a.bin"}])
def test_wrong_arguments_are_errors(tmp_path, wrong):
    given = {"source": write_nanogpt(tmp_path, [[1]]), "length": 1, "batch_size": 1, **wrong}
    with pytest.raises(fx.DataError, match=next(iter(wrong))):
        fx.tokens(given.pop("source"), world(1)[0], **given)
