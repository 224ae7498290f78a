"""Blends: shares exact to one row, and no row repeated or lost by a change. No processes."""

import collections
import itertools
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.token_files.records import weight_at
from tests.data._loaders import world
from tests.data._token_files import write_nanogpt

SIZES = {"a": 3, "b": 7, "c": 20, "d": 1, "e": 50}  # rows of one token
POSITIVE = st.floats(0.001, 10) | st.sampled_from([1.0, 3.0])
UPDATES = st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True).map(sorted)
SCHEDULES = UPDATES.flatmap(
    lambda updates: st.tuples(*[st.tuples(st.just(u), st.floats(0, 5)) for u in updates])
)
NAMES = st.lists(st.sampled_from(list(SIZES)), min_size=1, max_size=5, unique=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Row r of each source is the token r + 1."""
    found = {}
    for name, size in SIZES.items():
        folder = Path(tmp_path_factory.mktemp("blends"))
        found[name] = write_nanogpt(folder, [list(range(1, size))])
    return found


def _blend(sources, weights, **settings):
    parts = [
        fx.data.BlendPart(name=name, source=sources[name], weight=weight)
        for name, weight in weights.items()
    ]
    return fx.data.Blend(parts=parts, **settings)


def _weights(values, anchor):
    """By name; the first always has a weight above 0."""
    return NAMES.flatmap(
        lambda names: st.tuples(anchor, *[values for _ in names[1:]]).map(
            lambda found: dict(zip(names, found, strict=True))
        )
    )


CONSTANT = _weights(st.just(0.0) | POSITIVE, POSITIVE)


# The cut is after the last update in which "b" has a share, with a part of a row due to it.
FADED = {
    "a": 3.0,
    "b": ((2, 2.6224267358299773), (17, 1.1125369292536007e-308)),
    "c": 5.977549834972417,
    "d": 3.0,
    "e": 0.5,
}


@settings(max_examples=25)
@given(
    weights=_weights(POSITIVE | SCHEDULES, POSITIVE),
    accumulate=st.integers(1, 3),
    size=st.integers(1, 4),
    cut=st.integers(1, 60),
)
@example(weights=FADED, accumulate=2, size=1, cut=36)
def test_shares_are_exact_to_one_row_after_every_row(sources, weights, accumulate, size, cut):
    blend, plan = _blend(sources, weights), fx.Plan(accumulate=accumulate)
    loader = fx.tokens(blend, world(1)[0], plan, length=1, batch_size=size)
    due, read, rows = [Fraction(0)] * len(weights), [0] * len(weights), 0
    first = list(itertools.islice(loader, cut))
    rest = itertools.islice(loader.at(first[-1].position, loader.state()), 60)
    for batch in itertools.chain(first, rest):
        for source in batch.data["source"].tolist():
            now = [Fraction(weight_at(w, rows // (size * accumulate))) for w in weights.values()]
            due = [x + w / sum(now) for x, w in zip(due, now, strict=True)]
            read[source] += 1
            rows += 1
            assert max(abs(x - n) for x, n in zip(due, read, strict=True)) < 1


def _run(sources, parts, plan, *, shuffle=True):
    """(source, token) of each row of a run whose blend, ranks and batches change at its cuts."""
    rows, position, state = [], fx.Position(), None
    for weights, ranks, size, batches in parts:
        size = size * ranks if plan.batch == "global" else size
        loaders = [
            fx.tokens(
                _blend(sources, weights), ctx, plan, length=1, batch_size=size, shuffle=shuffle
            )
            for ctx in world(ranks)
        ]
        runs = [loader.at(position, state) for loader in loaders]
        for step in itertools.islice(zip(*runs, strict=True), batches):
            names = list(weights)
            for batch in step:
                numbers, tokens = batch.data["source"].tolist(), batch.data["tokens"][:, 0]
                rows += [(names[n], t) for n, t in zip(numbers, tokens.tolist(), strict=True)]
            position = step[0].position
        states = [json.dumps(run.state()) for run in runs]
        assert len(set(states)) == 1
        state = json.loads(states[0])
    return rows


PARTS = st.lists(
    st.tuples(CONSTANT, st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=20)
@given(parts=PARTS, seed=st.integers(0, 3), batch=st.sampled_from(["per_rank", "global"]))
def test_no_row_is_repeated_or_lost_when_a_blend_changes(sources, parts, seed, batch):
    rows = _run(sources, parts, fx.Plan(seed=seed, batch=batch))
    by_source = collections.defaultdict(list)
    for name, token in rows:
        by_source[name].append(token)
    for name, tokens in by_source.items():
        every = sorted([*range(1, SIZES[name]), 0])
        for lap in _laps(tokens, len(every)):
            assert len(set(lap)) == len(lap) and set(lap) <= set(every)
    # The order within a source is that of a run without any change.
    for name, tokens in by_source.items():
        alone = _run(sources, [({name: 1.0}, 1, 1, len(tokens))], fx.Plan(seed=seed))
        assert [token for _, token in alone] == tokens


def _laps(tokens, size):
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


@settings(max_examples=20)
@given(weights=CONSTANT, parts=PARTS)
def test_ranks_batches_and_cuts_do_not_change_a_blend(sources, weights, parts):
    cut = _run(sources, [(weights, *rest) for _, *rest in parts], fx.Plan())
    assert cut == _run(sources, [(weights, 1, 1, len(cut))], fx.Plan())


@settings(max_examples=25)
@given(
    weights=CONSTANT,
    ranks=st.integers(1, 3),
    size=st.integers(1, 4),
    even=st.sampled_from(["pad", "uneven", "drop"]),
    accumulate=st.integers(1, 3),
)
def test_a_blend_that_stops_ends_with_its_first_source(
    sources, weights, ranks, size, even, accumulate
):
    blend = _blend(sources, weights, ends="stop")
    plan = fx.Plan(even=even, accumulate=accumulate)
    loaders = [fx.tokens(blend, ctx, plan, length=1, batch_size=size) for ctx in world(ranks)]
    expected = []
    endless = fx.tokens(_blend(sources, weights), world(1)[0], length=1, batch_size=1)
    read = collections.Counter()
    for batch in endless:
        (source,) = batch.data["source"].tolist()
        if read[source] == SIZES[list(weights)[source]]:
            break
        read[source] += 1
        expected.append((source, batch.data["tokens"].item()))
    found, last = [], None
    for step in zip(*loaders, strict=True):
        for batch in step:
            real = batch.valid
            found += zip(
                batch.data["source"][real].tolist(),
                batch.data["tokens"][real, 0].tolist(),
                strict=True,
            )
        last = step[0].position
    rest = len(expected) % (size * ranks) if even == "drop" else 0
    assert found == expected[: len(expected) - rest]
    assert last is None or last.is_last
