"""Rows of tokens: each exactly once, for any ranks, batches, cuts and resumes. No processes."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from tests.data._loaders import world
from tests.data._token_files import write_megatron, write_nanogpt

NUMBERS = itertools.count()
# Sizes of the sequences of each document. Every token is another number.
SOURCES = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=9
).filter(lambda documents: sum(map(sum, documents)))
# Of each part of a run: ranks, rows of a batch on each, batches until it is cut.
PARTS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6)), max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


def _write(folder, sequences, kind):
    """A source, and its documents as it has them."""
    numbers = itertools.count(1)
    documents = [list(itertools.islice(numbers, sum(sizes))) for sizes in sequences]
    place = Path(folder, str(next(NUMBERS)))
    place.mkdir()
    if kind == "megatron":
        return write_megatron(place, documents, sequences), documents
    source = write_nanogpt(place, documents)
    return source, [[*document, 0] for document in documents]


def _expected(documents, length, *, apart):
    """Each row as a list of [token, label] or [token, label, position, document]."""
    flat = [(token, d) for d, document in enumerate(documents) for token in document]
    rows = []
    for start in range(0, len(flat), length):
        row, number, position = [], -1, 0
        for at in range(start, min(start + length, len(flat))):
            token, document = flat[at]
            new = at == start or flat[at - 1][1] != document
            number, position = number + new, 0 if new else position + 1
            follows = at + 1 < len(flat) and (not apart or flat[at + 1][1] == document)
            entry = [token, flat[at + 1][0] if follows else -100, position, number]
            row.append(entry if apart else entry[:2])
        padding = [0, -100, 0, -1] if apart else [0, -100]
        rows.append(row + [padding] * (length - len(row)))
    return rows


def _rows(batch):
    """The real rows of one rank, with all that is known of each token."""
    return torch.stack([value.long() for value in batch.data.values()], -1)[batch.valid].tolist()


def _run(source, parts, plan, start, **settings):
    """The rows of a run that is cut and resumed with other ranks and batches, in order."""
    rows, position = [], start
    for ranks, size, batches in [*parts, (1, 3, None)]:
        total = size * ranks if plan.batch == "global" else size
        loaders = [
            fx.tokens(source, ctx, plan, batch_size=total, **settings).at(position)
            for ctx in world(ranks)
        ]
        columns = zip(*loaders, strict=True)
        for step in itertools.islice(columns, batches):
            rows += [row for batch in step for row in _rows(batch)]
            position = step[0].position
        if position.is_last:
            break
    return rows, position


@given(
    sequences=SOURCES,
    kind=st.sampled_from(["megatron", "nanogpt"]),
    length=st.integers(1, 12),
    parts=PARTS,
    seed=st.integers(0, 9),
    epoch=st.integers(0, 2),
    apart=st.booleans(),
    shuffle=st.booleans(),
    accumulate=st.integers(1, 3),
    batch=st.sampled_from(["per_rank", "global"]),
    even=st.sampled_from(["pad", "uneven"]),
)
def test_rows_come_once_for_any_ranks_batches_cuts_and_resumes(
    folder, sequences, kind, length, parts, seed, epoch, apart, shuffle, accumulate, batch, even
):
    source, documents = _write(folder, sequences, kind)
    plan = fx.Plan(seed=seed, accumulate=accumulate, batch=batch, even=even)
    settings = {"length": length, "documents": apart, "shuffle": shuffle}
    start = fx.Position(epoch=epoch)
    rows, position = _run(source, parts, plan, start, **settings)
    assert sorted(rows) == sorted(_expected(documents, length, apart=apart))
    assert rows == _run(source, [], plan, start, **settings)[0]
    assert position.samples == len(rows)


@settings(max_examples=4)
@given(sequences=SOURCES, parts=PARTS.filter(lambda parts: len(parts) < 3), workers=st.just(1))
def test_workers_do_not_change_a_run(folder, sequences, parts, workers):
    source, _ = _write(folder, sequences, "megatron")
    parts = [(1, size, batches) for _, size, batches in parts]
    settings = {"length": 3, "documents": True}
    start = fx.Position()
    found = _run(source, parts, fx.Plan(), start, workers=workers, **settings)
    assert found == _run(source, parts, fx.Plan(), start, **settings)
