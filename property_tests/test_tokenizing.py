"""Text that is tokenized and read again is the same, for any parts, stops and processes."""

import contextlib
import itertools
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.testing.cluster import starter
from tests.data._texts import (
    WORDS,
    Stopped,
    documents_of,
    stop_after,
    tokens_of,
    write_lines,
    write_tokenizer,
)

NUMBERS = itertools.count()
LARGE = WORDS | {"z": 70_000}
TEXTS = st.lists(st.lists(st.sampled_from(["a", "b", "c", "d", "z"])).map(" ".join), min_size=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


def _written(place, files, settings, *, part, stops=(), workers=1):
    """The source, and the bytes of its files, after runs that stop after some parts."""
    inputs = [str(write_lines(place / f"{n}.jsonl", texts)) for n, texts in enumerate(files)]
    output = str(place / f"out-{next(NUMBERS)}")
    tokenizer = write_tokenizer(place, LARGE)
    with mock.patch("fxtrain.token_files.tokenizing._SMALLEST", part):
        for stop in stops:
            with contextlib.suppress(Stopped):
                fx.data.tokenize(inputs, output, tokenizer, **settings, progress=stop_after(stop))
        source = fx.data.tokenize(inputs, output, tokenizer, workers=workers, **settings)
    names = [output + suffix for suffix in (".bin", ".idx") if Path(output + suffix).exists()]
    return source, [Path(name).read_bytes() for name in names]


@settings(max_examples=15)
@given(
    files=st.lists(TEXTS, min_size=1, max_size=3).filter(
        lambda files: any(text for texts in files for text in texts)
    ),
    form=st.sampled_from([("megatron", None), ("megatron", "int64"), ("nanogpt", "int64")]),
    end=st.sampled_from([None, "<end>"]),
    parts=st.tuples(st.integers(8, 200), st.integers(8, 200)),
    stops=st.lists(st.integers(0, 9), max_size=3),
)
def test_what_is_written_is_read(folder, files, form, end, parts, stops):
    place = folder / str(next(NUMBERS))
    place.mkdir()
    format, dtype = form
    how = {"format": format, "dtype": dtype, "end": end}
    source, written = _written(place, files, how, part=parts[0], stops=stops)
    ends = [] if end is None else [0]
    expected = [tokens_of(text, *ends, words=LARGE) for texts in files for text in texts if text]
    if end is None and format == "nanogpt":  # which has nothing else between documents
        expected = [list(itertools.chain.from_iterable(expected))]
    assert documents_of(source) == expected
    for path in place.glob("[0-9].jsonl"):
        path.unlink()
    assert _written(place, files, how, part=parts[1])[1] == written


def test_processes_write_the_bytes_of_one(folder):
    place = folder / "workers"
    place.mkdir()
    files = [["a b c", "d", "z z", ""] * 5, ["b"], ["c c c c"] * 7]
    how = {"format": "megatron", "end": "<end>"}
    alone = _written(place, files, how, part=40)[1]
    # As processes that have torch loaded; tests/data/test_tokenizing.py has real starts.
    context = starter()
    with mock.patch(
        "fxtrain.token_files.tokenizing.multiprocessing.get_context", lambda _: context
    ):
        assert _written(place, files, how, part=40, stops=[2], workers=2)[1] == alone
