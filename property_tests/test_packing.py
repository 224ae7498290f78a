"""Best-fit packing: nothing is lost, little is cut, and rows are found from their number."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.data.order import permutation_in_blocks
from fxtrain.token_files.rows import pack_documents
from tests.data._loaders import world
from tests.data._token_files import write_megatron, write_nanogpt

NUMBERS = itertools.count()
SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packing")


@given(sizes=SIZES, length=st.integers(1, 20), last=st.booleans(), start=st.integers(0, 5))
def test_a_window_is_packed_into_the_rows_that_its_tokens_need(sizes, length, last, start):
    borders = np.concatenate([[0], np.cumsum(sizes)]) + start
    bounds, begins, piece_sizes, lasts, cut = pack_documents(borders, length, last=last)
    rows, total = len(bounds) - 1, sum(sizes)
    assert rows == -(-total // length) and bounds[-1] == len(begins)
    filled = np.add.reduceat(piece_sizes, bounds[:-1])
    assert (piece_sizes > 0).all() and (filled <= length).all() and (filled > 0).all()
    covered = [
        token
        for begin, size in zip(begins, piece_sizes, strict=True)
        for token in range(begin, begin + size)
    ]
    assert sorted(covered) == list(range(start, start + total))
    # Each piece is within one document, and the last one of it says so.
    ends = set(borders[1:].tolist()) - ({start + total} if not last else set())
    pieces = list(zip(begins.tolist(), piece_sizes.tolist(), lasts, strict=True))
    for begin, size, closes in pieces:
        assert not any(begin < border < begin + size for border in borders)
        assert closes == (begin + size in ends)
    parts = {begin: 0 for begin in borders[:-1].tolist()}
    for begin, _, _ in pieces:
        parts[max(border for border in parts if border <= begin)] += 1
    count = {b: s for b, s in zip(borders[:-1].tolist(), sizes, strict=True) if s}
    assert cut == sum(parts[b] > 1 for b, size in count.items() if size <= length)


@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=40),
    length=st.integers(20, 40),
)
def test_a_document_is_cut_only_where_no_row_has_room(sizes, length):
    """Without windows or long documents, what is cut is longer than any room that was left."""
    borders = np.concatenate([[0], np.cumsum(sizes)])
    bounds, begins, _, _, cut = pack_documents(borders, length, last=True)
    if cut == 0:
        assert set(begins.tolist()) == set(borders[:-1].tolist())
    else:  # then rows are full, or the padding is less than what one more row would hold
        padding = (len(bounds) - 1) * length - sum(sizes)
        assert padding < length


def _write(folder, documents, kind):
    place = Path(folder, str(next(NUMBERS)))
    place.mkdir()
    return (write_megatron if kind == "megatron" else write_nanogpt)(place, documents)


def _rows(batch):
    return torch.stack([value.long() for value in batch.data.values()], -1)[batch.valid].tolist()


@settings(max_examples=20)
@given(
    sizes=SIZES,
    kind=st.sampled_from(["megatron", "nanogpt"]),
    length=st.integers(1, 20),
    window=st.integers(1, 5),
    together=st.integers(1, 3),
    shuffle=st.booleans(),
    parts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)), max_size=3),
    blended=st.booleans(),
)
def test_packed_rows_come_once_for_any_ranks_batches_cuts_and_resumes(
    folder, sizes, kind, length, window, together, shuffle, parts, blended
):
    numbers = itertools.count(1)
    documents = [list(itertools.islice(numbers, size)) for size in sizes]
    source = _write(folder, documents, kind)
    if kind == "nanogpt":
        documents = [[*document, 0] for document in documents]
    if blended:
        part = fx.data.BlendPart(name="a", source=source)
        source = fx.data.Blend(parts=[part], ends="stop")
    packing = fx.data.BestFit(window_rows=window, shuffle_windows=together)

    def run(parts):
        rows, position, state = [], fx.Position(), None
        for ranks, size, batches in [*parts, (1, 2, None)]:
            loaders = [
                fx.tokens(
                    source, ctx, length=length, batch_size=size, packing=packing, shuffle=shuffle
                ).at(position, state)
                for ctx in world(ranks)
            ]
            for step in itertools.islice(zip(*loaders, strict=True), batches):
                for batch in step:
                    batch.data.pop("source", None)
                    rows += _rows(batch)
                position = step[0].position
            state = loaders[0].state()
            if position.is_last:
                break
        return rows

    rows = run(parts)
    assert rows == run([])
    total = sum(map(len, documents))
    assert len(rows) == -(-total // length)
    real = [entry for row in rows for entry in row if entry[3] >= 0]
    assert sorted(token for token, *_ in real) == sorted(t for d in documents for t in d)
    # Every token predicts the next one of its document, also where a document is cut.
    follows = sorted(pair for d in documents for pair in itertools.pairwise(d))
    assert sorted((token, label) for token, label, *_ in real if label != -100) == follows
    for row in rows:
        inside = [entry for entry in row if entry[3] >= 0]
        assert row[len(inside) :] == [[0, -100, 0, -1]] * (length - len(inside))
        for before, after in itertools.pairwise(inside):
            same = before[3] == after[3]
            assert after[2:] == ([before[2] + 1, before[3]] if same else [0, before[3] + 1])
            assert not same or before[1] == after[0]


@given(n=st.integers(1, 300), block=st.integers(1, 100), seed=st.integers(0, 5))
def test_permutations_in_blocks_visit_each_block_at_once(n, block, seed):
    find = permutation_in_blocks(n, block, seed)
    found = find(torch.arange(n))
    assert sorted(found.tolist()) == list(range(n))
    if block < n:
        blocks = [key for key, _ in itertools.groupby((found // block).tolist())]
        assert len(blocks) == len(set(blocks))
    one = torch.cat([find(torch.tensor([place])) for place in range(n)])
    assert torch.equal(one, found)
