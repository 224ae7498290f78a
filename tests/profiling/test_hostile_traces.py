"""Traces that somebody else wrote: one error for each file, in bounded memory and linear time."""

import gzip
import json
import os
import time
import tracemalloc
import zlib

import pytest

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.profiling import summary
from tests._damage import only

STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": 1, "tid": 1,
        "ts": 0, "dur": 1000}  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
HUGE = 10**400


def _write(folder, text, name="rank-0.json"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


FIELDS = {
    "rank is a table": {"fxtrain": {"rank": {}}},
    "rank is null": {"fxtrain": {"rank": None}},
    "rank is markup": {"fxtrain": {"rank": "[/x]"}},
    "rank has escapes": {"fxtrain": {"rank": "\x1b[2J\x1b]0;title\x07"}},
    "rank has 400 digits": {"fxtrain": {"rank": HUGE}},
    "rank of torch is text": {"distributedInfo": {"rank": "0"}},
    "cycle is text": {"fxtrain": {"cycle": "0"}},
    "no steps": {"fxtrain": {"steps": 0}},
    "flops is text": {"fxtrain": {"flops": "x"}},
    "flops has 400 digits": {"fxtrain": {"flops": HUGE}},
    "ts is infinite": {"traceEvents": [{**STEP, "ts": float("inf")}]},
    "ts is no number": {"traceEvents": [{**STEP, "ts": True}]},
    "dur has 400 digits": {"traceEvents": [{**STEP, "dur": HUGE}]},
    "name is a list": {"traceEvents": [{**STEP, "name": []}]},
    "category is a list": {"traceEvents": [{**STEP, "cat": []}]},
    "thread is a list": {"traceEvents": [STEP, {**STEP, "cat": "cpu_op", "tid": [1]}]},
    "correlation is a list": {"traceEvents": [{**STEP, "args": {"correlation": []}}]},
    "steps overlap": {"traceEvents": [STEP, {**STEP, "ts": 10}]},
    "it is a list": {"fxtrain": []},
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_wrong_kind_is_an_error_that_names_the_file(tmp_path, capsys, name):
    path = _write(tmp_path, json.dumps({"traceEvents": [STEP], **FIELDS[name]}))
    assert not only(fx.PlanError, summary, path)
    assert main(["profile", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "rank-0.json: this" in told.err and len(told.err.splitlines()) == 1
    assert "\x1b" not in told.err + told.out


@pytest.mark.parametrize(
    "text",
    [f'{{"traceEvents": {DEEP}}}', f'{{"a": {DEEP}}}', DEEP, '{"traceEvents": [', '{"a": 1,'],
)
def test_nesting_and_ends_are_errors(tmp_path, text):
    with pytest.raises(fx.PlanError, match=r"nested too deeply|not a complete Chrome trace"):
        summary(_write(tmp_path, text))


def test_a_folder_reports_each_file_once(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    (tmp_path / "b.json").symlink_to("/dev/zero")
    (tmp_path / "c.json").write_text("{")
    (tmp_path / "d.json").mkdir()
    _write(tmp_path, json.dumps({"traceEvents": [STEP]}))
    with pytest.raises(fx.PlanError) as caught:
        summary(tmp_path)
    lines = caught.value.message.splitlines()
    assert [line[len(str(tmp_path)) + 1 :].partition(":")[0] for line in lines] == [
        "a.json", "b.json", "c.json",
    ]  # fmt: skip
    assert "pipe" in lines[0] and "device" in lines[1]


def _bomb(path, filler, mebibytes):
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packer.compress(b'{"traceEvents":['))
        for _ in range(mebibytes):
            file.write(packer.compress(filler * ((1 << 20) // len(filler))))
        file.write(packer.flush())


@pytest.mark.parametrize(
    ("filler", "words"),
    [(b" ", "larger than 64 MiB"), (b"[", "nested too deeply"), (b"a", "not a complete Chrome")],
    ids=["blanks", "brackets", "letters"],
)
def test_a_small_file_that_unpacks_to_much_is_refused_early(tmp_path, filler, words):
    _bomb(tmp_path / "rank-0.json.gz", filler, 128)
    tracemalloc.start()
    with pytest.raises(fx.PlanError, match=words):
        summary(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_one_long_entry_is_refused(tmp_path):
    with pytest.raises(fx.PlanError, match="an entry is longer than 16 MiB"):
        summary(_write(tmp_path, '{"a": "' + "x" * (40 << 20)))


def test_many_steps_take_linear_time(tmp_path):
    def seconds(count):
        events = [{**STEP, "ts": 10 * n, "dur": 10} for n in range(count)]
        events += [
            {**STEP, "cat": "cpu_op", "name": "aten::mm", "ts": 10 * n, "dur": 5}
            for n in range(count)
        ]
        path = _write(tmp_path, json.dumps({"traceEvents": events}))
        started = time.process_time()
        assert len(summary(path).ranks[0].steps) == count
        return time.process_time() - started

    assert seconds(4_000) < 12 * seconds(1_000)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_borders_of_chunks_change_nothing(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("fxtrain.profiling.tracing.trace_file._CHUNK", chunk)
    about = {"rank": 12345, "cycle": 67, "steps": 1, "flops": 890}
    data = {"schemaVersion": 123456, "fxtrain": about, "traceEvents": [STEP, {"ph": "M"}]}
    path = _write(tmp_path, json.dumps({**data, "traceName": "ä \U0001f600 \\u00e4"}, indent=1))
    with gzip.open(tmp_path / "packed.json.gz", "wt") as file:
        file.write(path.read_text())
    for one in (path, tmp_path / "packed.json.gz"):
        (found,) = summary(one).ranks
        assert (found.rank, found.flops, found.total.step_ns) == (12345, 890, 1_000_000)
