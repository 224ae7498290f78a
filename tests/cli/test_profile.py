"""`fxtrain profile`."""

import json

import pytest

from fxtrain.cli import Exit, main


def _write(folder, rank, idle):
    """A trace in which a rank computes for 40 µs of each step and is idle for the rest."""
    end = 50 + idle
    events = [
        {"cat": "user_annotation", "name": "ProfilerStep#0", "ts": 0, "dur": end},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 40},
        {"cat": "cpu_op", "name": "c10d::allreduce_", "ts": 40, "dur": 10},
    ]
    path = folder / "cycle-000"
    path.mkdir(exist_ok=True)
    about = {"rank": rank, "cycle": 0, "steps": 1}
    (path / f"rank-{rank:05}.json").write_text(
        json.dumps({"fxtrain": about, "traceEvents": [{"ph": "X", **one} for one in events]})
    )


def test_the_slowest_rank_is_named(tmp_path, capsys):
    for rank, idle in enumerate((2000, 9000, 1000)):
        _write(tmp_path, rank, idle)
    (tmp_path / "cycle-000" / ".rank-00009.json.gz.part.json").write_text("unfinished")
    assert main(["profile", str(tmp_path)]) == Exit.WELL
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["1", "9.050", "0.000", "0.040", "0.000", "0.010", "0.000", "0.000", "9.000"] in rows
    assert "Slowest: rank 1, 9.040 ms per step without communication" in shown
    assert "fastest: rank 2, 1.040 ms. Largest difference: idle, +8.000 ms." in " ".join(
        shown.split()
    )


def test_json_has_every_step(tmp_path, capsys):
    _write(tmp_path, 3, 50)
    assert main(["profile", str(tmp_path), "--json"]) == Exit.WELL
    found = json.loads(capsys.readouterr().out)
    assert found["slowest"] is None
    (one,) = found["ranks"]
    assert one["rank"] == 3
    assert one["steps"][0]["step_ns"] == 100_000
    assert one["steps"][0]["idle_ns"] == 50_000


@pytest.mark.parametrize(("name", "words"), [("", "contains no traces"), ("no", "cannot read")])
def test_what_cannot_be_read_is_one_message(tmp_path, capsys, name, words):
    assert main(["profile", str(tmp_path / name)]) == Exit.WRONG
    assert words in capsys.readouterr().err
