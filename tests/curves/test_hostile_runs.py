"""Runs that somebody else wrote: damaged lines are counted and skipped, in bounded memory."""

import io
import json
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain._reading import LONGEST_LINE, lines_of
from fxtrain.cli import main
from fxtrain.curves import RunReader, page_of, read_curves
from fxtrain.curves.reading import MOST_METRICS
from fxtrain.trackers import read_run
from tests._growth import costs_of
from tests.curves._runs import written

HUGE = 10**400
DEEP = json.loads("[" * 500 + "]" * 500)
VERY_DEEP = "[" * 100_000 + "]" * 100_000
GOOD = {"step": 3, "rows": 3, "time": 3.0, "values": {"loss": 0.5}}
ODD = [
    {"step": 1, "rows": HUGE, "values": {"loss": 1.0}},
    {"step": 1, "rows": 1, "time": HUGE, "values": {"loss": 1.0}},
    {"step": 1, "rows": 1, "time": True, "values": {"loss": 1.0}},
    {"step": 1, "values": {"loss": HUGE}},
    {"step": 2, "values": {"loss": -HUGE}},
    {"step": 2, "values": {"loss": DEEP}},
    {"step": HUGE, "values": {"loss": 1.0}},
    {"step": 1, "time": HUGE, "start": {"name": DEEP, "params": {"a": DEEP, "b": HUGE}}},
    {"step": 1, "start": {"name": "n" * 100_000, "params": DEEP}},
    {"step": 1, "artifact": {"a": DEEP, "b": HUGE}},
    {"step": 1, "table": {"a": {"columns": [DEEP], "rows": [[DEEP], [HUGE], DEEP]}}},
]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _shown(folder, capsys):
    """What both commands print; the page."""
    assert main(["watch", str(folder)]) == 0
    assert main(["report", str(folder)]) == 0
    told = capsys.readouterr()
    assert all(one.isprintable() or one == "\n" for one in told.out + told.err)
    return told.out, (folder.parent / "report.html").read_text()


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_numbers_and_nesting_are_no_tracebacks(tmp_path, capsys, odd):
    folder = written(tmp_path / "run", [odd, GOOD, odd])
    out, _ = _shown(folder, capsys)
    assert "loss" in out and "0.5" in out
    (run,) = read_curves([folder])
    assert run.curves["loss"].values[-1 if odd["step"] == 1 else 0] in (0.5, 1.0)


def test_values_that_cancel_are_no_numbers(tmp_path):
    folder = written(tmp_path, [ODD[3], ODD[4], GOOD])
    assert read_curves([folder])[0].curves["loss"].values == [0.5]


def test_a_line_that_is_nested_too_deeply_is_damaged(tmp_path, capsys):
    deep = json.dumps(GOOD).replace("0.5", VERY_DEEP) + "\n"
    folder = written(tmp_path / "run", [deep, GOOD, "{\n"])
    out, page = _shown(folder, capsys)
    assert "2 damaged lines" in out and ">2</td>" in page


@pytest.mark.parametrize("size", [LONGEST_LINE - 1, LONGEST_LINE, LONGEST_LINE + 1])
def test_a_line_is_damaged_beyond_a_length(tmp_path, size):
    line = json.dumps(GOOD)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        start = {"step": 0, "start": {"name": "a", "params": {}}}
        file.write(json.dumps(start) + "\n" + line + " " * (size - len(line)) + "\n")
        file.write(line + "\n")
    damaged = size >= LONGEST_LINE  # with its line break
    (run,) = read_curves([tmp_path])
    reader = RunReader(path=tmp_path / "metrics.jsonl").read()
    assert run.damaged == reader.run.damaged == damaged
    assert run.curves["loss"].count == reader.run.curves["loss"].count == 2 - damaged


def _long(path, mebibytes):
    """A file with one line that is that long, and occupies no space on the disk; then others."""
    with open(path, "wb") as file:
        file.write(b'{"step":0,"time":1,"start":{"name":"r","params":{}}}\n')
        file.truncate(mebibytes << 20)
        file.seek(0, os.SEEK_END)
        file.write(f"\n{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n".encode())


def test_a_long_line_takes_bounded_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _long(path, 128)
    tracemalloc.start()
    reader = RunReader(path=path).read()
    assert read_curves([path.parent])[0].damaged == reader.run.damaged == 1
    assert reader.run.curves["loss"].count == 2 and reader.end == path.stat().st_size
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_a_long_line_that_still_grows_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _long(path, 40)
    whole = path.read_bytes()
    reader = RunReader(path=path)
    for end in (30 << 20, 35 << 20, 40 << 20, (40 << 20) + 1, len(whole) - 5, len(whole)):
        with open(path, "r+b") as file:  # the file that has been read so far
            file.truncate(end)
            file.seek(0)
            file.write(whole[:end])
        reader.read()
    count = reader.run.curves["loss"].count
    assert (reader.run.damaged, count, reader.end) == (2, 2, len(whole))


@pytest.mark.slow
def test_a_million_names_are_limited_and_counted(tmp_path, capsys):
    names = MOST_METRICS + 2000
    lines = [{"step": 1, "values": {f"m{n}": 1.0 for n in range(names // 2)}}]
    lines += [{"step": 1, "values": {f"m{n}": 1.0, "loss": 2.0}} for n in range(names // 2, names)]
    folder = written(tmp_path / "run", lines)
    out, page = _shown(folder, capsys)
    left = names + 1 - MOST_METRICS
    assert f"{left:,} values of further metrics are not shown." in page
    assert "more metrics" in out and len(out.splitlines()) < 600
    (run,) = read_curves([folder])
    assert (len(run.curves), run.left_out) == (MOST_METRICS, left)
    assert run.curves["loss"].count == names - names // 2


@pytest.mark.slow
def test_calls_grow_with_names_and_no_faster(tmp_path):
    counts = []
    for updates in (50, 100, 200):
        lines = [
            {"step": n, "values": {f"m{n}/{m}": 1.0 for m in range(1000)}} for n in range(updates)
        ]
        folder = written(tmp_path / str(updates), lines)
        counts.append(costs_of(lambda folder=folder: page_of(read_curves([folder]))).calls)
    assert counts[2] - counts[1] < 2.2 * (counts[1] - counts[0])


class _Counted(io.BytesIO):
    read_bytes = 0

    def readline(self, size=-1):
        line = super().readline(size)
        self.read_bytes += len(line)
        return line


@given(data=st.binary(max_size=60), longest=st.integers(1, 10))
def test_lines_are_those_of_the_file(data, longest):
    """Every byte of it is read once."""
    file = _Counted(data)
    found = list(lines_of(file, longest))
    assert found == [line if len(line) <= longest else None for line in io.BytesIO(data)]
    assert file.read_bytes == len(data)


def test_read_run_counts_a_long_line(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx, fx.track(tmp_path, ctx) as run:
        run.log({"loss": 0.5}, 1)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.truncate(file.tell() + LONGEST_LINE + 1)
        file.write(b"\n")
    log = read_run(tmp_path)
    assert (log.damaged, log.curve("loss")) == (1, [(1, 0.5)])


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_run_is_a_regular_file(tmp_path, capsys, kind):
    path = tmp_path / "metrics.jsonl"
    {"fifo": os.mkfifo, "device": lambda one: one.symlink_to("/dev/zero"), "folder": os.mkdir}[
        kind
    ](path)
    for command in ("report", "watch"):
        assert main([command, str(tmp_path)]) == 2
        assert "metrics.jsonl" in capsys.readouterr().err
