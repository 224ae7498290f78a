"""Curves of a run: read in parts, by any parser, and thinned out without losing an extreme."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxtrain.curves import RunReader, page_of, read_curves
from fxtrain.curves.reading import Curve
from fxtrain.trackers import read_run
from tests.curves._runs import written


def _same(left, right):
    return all(a == b or (a != a and b != b) for a, b in zip(left, right, strict=True))


_NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["nan", "inf", "-inf"])
)
_LINES = st.one_of(
    st.builds(
        lambda step, values, rows: {"step": step, **rows, "time": 1.5, "values": values},
        st.integers(0, 2**40),
        st.dictionaries(st.sampled_from(["loss", "lr", "ü"]), _NUMBERS, max_size=3),
        st.sampled_from([{}, {"rows": 7}]),
    ),
    st.sampled_from(
        [
            "\n",
            '{"step":1,"val\n',
            "[1]\n",
            '{"a":{}\n',
            "1],[2\n",
            "\udcff\n",
            '{"step":"x"}\n',
            ' {"step":3,"values":{"loss":1.0}} \r\n',
            "[" * 3000 + "\n",
        ]
    ),
)


@given(lines=st.lists(_LINES, max_size=12))
@settings(max_examples=25)
def test_a_report_has_what_read_run_has(tmp_path_factory, lines):
    folder = written(tmp_path_factory.mktemp("run"), lines)
    (folder / "run.json").write_text(json.dumps({"format": 1, "id": "0" * 32, "identities": []}))
    log, path = read_run(folder), folder / "metrics.jsonl"
    reader = RunReader(path=path).read(ended=True)
    assert reader.run.damaged == log.damaged
    for name in ("loss", "lr", "ü"):
        expected = log.curve(name)
        curve = reader.run.curves.get(name)
        steps = [] if curve is None else list(curve.axis("updates"))
        assert steps == [x for x, _ in expected]
        assert curve is None or _same(curve.values, [y for _, y in expected])


@given(
    values=st.lists(st.sampled_from([math.nan, math.inf, *range(50)]), min_size=1, max_size=2000),
    limit=st.integers(8, 40),
)
@settings(max_examples=25)
def test_a_curve_is_thinned_out_evenly_and_keeps_its_extremes(values, limit):
    curve = Curve()
    for at, value in enumerate(values):
        curve.add((at, at, at), float(value), limit)
    curve.thin(limit)
    steps = curve.axis("updates")
    bad = sum(not math.isfinite(value) for value in values)
    assert (curve.count, curve.nonfinite) == (len(values), bad)
    assert len(curve.values) <= 3 * (limit / 2 + 1) + 2
    assert _same(curve.values, [float(values[int(at)]) for at in steps])
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert steps == sorted(steps)
    for start in range(0, len(values), curve.width):
        bucket = values[start : start + curve.width]
        kept = [values[int(at)] for at in steps if start <= at < start + curve.width]
        real, left = ([v for v in part if math.isfinite(v)] for part in (bucket, kept))
        assert not real or (min(real), max(real)) == (min(left), max(left))
        assert len(real) == len(bucket) or len(left) < len(kept)


@pytest.mark.slow
def test_a_long_run_is_small_and_keeps_its_spikes(tmp_path):
    spikes = {10_000: 99.0, 33_333: -99.0, 20_000: "nan"}
    lines = [
        {
            "step": at,
            "values": {
                "loss": spikes.get(at, math.sin(at)),
                **{f"m{number}": (at * 7919 + number) % 1000 / 7 for number in range(5)},
            },
        }
        for at in range(1, 40_001)
    ]
    written(tmp_path, lines)
    alone = read_curves([tmp_path])[0]
    assert 2e6 < len(page_of([alone])) < 5e6
    curve = alone.curves["loss"]
    assert (curve.count, curve.nonfinite) == (40_000, 1)
    assert len(curve.values) <= 15_000
    at = dict(zip(curve.axis("updates"), curve.values, strict=True))
    assert (at[10_000], at[33_333]) == (99.0, -99.0) and math.isnan(at[20_000])
    assert (curve.axis("updates")[0], curve.axis("updates")[-1]) == (1, 40_000)


def test_values_that_are_no_numbers_are_not_drawn(tmp_path):
    lines = [{"step": 1, "values": {"loss": one}} for one in (None, "x", [], 10**400, {}, 2, True)]
    written(tmp_path, [*lines, {"step": 2, "values": 3}, {"step": 10**30, "values": {}}])
    run = read_curves([tmp_path])[0]
    assert run.curves["loss"].values == [2.0, 1.0] and run.damaged == 1
    assert "Not finite" in page_of([run])


def test_both_parsers_read_the_same(tmp_path, monkeypatch):
    pytest.importorskip("orjson", reason='needs orjson: pip install "fxtrain[report]"')
    values = '"loss":%s,"other":0.1234567890123456789'
    odd = ("1e999", "NaN", str(10**400), "-0.0", "5e-324", '"\\ud800"', str(2**70), "0.1", "01")
    lines = [f'{{"step":{at},"values":{{{values % one}}}}}\n' for at, one in enumerate(odd)]
    written(tmp_path, [*lines, '{"step":NaN}\n', '{"step":3.0,"values":{}}\n', "\n", "{\n"])
    fast = read_curves([tmp_path])[0]
    monkeypatch.setattr("fxtrain.curves.reading._parse", json.loads)
    slow = read_curves([tmp_path])[0]
    assert repr(fast) == repr(slow)
    assert fast.curves["loss"].count > 4
