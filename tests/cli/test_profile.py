"""`fxtrain profile`."""

import json

import pytest

from fxtrain.cli import Exit, main
from fxtrain.profiling import RankTimes, StepTimes, Summary
from fxtrain.state import write_record


def _write(folder, idle_us):
    """The times of ranks that compute for 40 µs of a step, and are idle for so many."""
    ranks = [
        RankTimes(
            rank=rank,
            steps=(
                StepTimes(
                    step_ns=(50 + idle) * 1000,
                    forward_ns=40_000,
                    communication_ns=10_000,
                    idle_ns=idle * 1000,
                ),
            ),
        )
        for rank, idle in idle_us.items()
    ]
    write_record(Summary(ranks=tuple(ranks)), folder / "summary.json")


def test_the_slowest_rank_is_named(tmp_path, capsys):
    _write(tmp_path, {0: 2000, 1: 9000, 2: 1000})
    assert main(["profile", str(tmp_path)]) == Exit.WELL
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines()]
    assert ["1", "9.050", "0.000", "0.040", "0.000", "0.010", "0.000", "0.000", "9.000"] in rows
    assert "Largest part of a step: idle, 4.000 ms (99%)." in shown
    assert "Slowest: rank 1, 9.040 ms per step without communication" in shown
    assert "fastest: rank 2, 1.040 ms. Largest difference: idle, +8.000 ms." in " ".join(
        shown.split()
    )


def test_json_has_every_step(tmp_path, capsys):
    _write(tmp_path, {3: 50})
    assert main(["profile", str(tmp_path)]) == Exit.WELL
    assert "Largest part of a step: idle, 0.050 ms (50%)." in capsys.readouterr().out
    assert main(["profile", str(tmp_path), "--json"]) == Exit.WELL
    found = json.loads(capsys.readouterr().out)
    assert found["slowest"] is None
    (one,) = found["ranks"]
    assert one["rank"] == 3
    assert one["steps"][0]["step_ns"] == 100_000
    assert one["steps"][0]["idle_ns"] == 50_000


@pytest.mark.parametrize("name", ["", "no"])
def test_what_cannot_be_read_is_one_message(tmp_path, capsys, name):
    assert main(["profile", str(tmp_path / name)]) == Exit.WRONG
    assert "No such file" in capsys.readouterr().err
