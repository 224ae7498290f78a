"""Training over machines: every strategy, and runs that continue on other numbers of machines."""

import pytest

from tests.nodes._lab import SCRIPTS
from tests.nodes._rows import every_row_once

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(150)]
ROWS = 240


def _train(lab, count, *words, ranks=1):
    return [
        node.launch(
            *(f"--nodes={count}", f"--ranks={ranks}", "--main-address=n0", SCRIPTS / "train.py"),
            *("--folder", lab.shared / "runs", *words),
        )
        for node in lab.nodes[:count]
    ]


def _finish(programs):
    codes = [program.finish(90) for program in programs]
    assert set(codes) == {0}, "\n".join(program.text[-3000:] for program in programs)


# Arguments, and how many ranks see each row; a stage of a pipeline sees parts of its batch.
STRATEGIES = {
    "ddp": ((), 1),
    "fsdp": ((), 1),
    "tp": (("--mesh", '{"tensor": 2}'), 2),
    "pp": (("--mesh", '{"pipeline": 2}'), 0),
    "local": ((), 1),
    "diloco": ((), 1),
}
# Shards within a machine, copies across machines.
HSDP = ("--strategy", "hsdp", "--mesh", '{"replicate": 2, "shard": 2}')


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_over_machines(lab, strategy):
    words, copies = STRATEGIES[strategy]
    programs = _train(lab, 2, "--strategy", strategy, *words)
    _finish(programs)
    assert "done" in programs[0].text
    if copies:
        every_row_once(lab, ROWS, copies)


@pytest.mark.slow
def test_shards_within_machines_and_replicas_across_them(lab):
    _finish(_train(lab, 2, *HSDP, ranks=2))
    every_row_once(lab, ROWS)


@pytest.mark.parametrize(
    ("strategy", "first", "then"),
    [
        ("fsdp", 2, 3),
        pytest.param("ddp", 2, 3, marks=pytest.mark.slow),
        pytest.param("fsdp", 3, 1, marks=pytest.mark.slow),
        pytest.param("ddp", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_on_other_machines(lab, strategy, first, then):
    """After one of them lost its power."""
    words = ("--strategy", strategy, "--timeout", "5", "--sleep", "0.1")
    programs = _train(lab, first, *words)
    programs[0].wait_for("update 8.")
    lab.nodes[first - 1].power_off()
    for program in programs[:-1]:
        assert program.finish(40) == 1
    lab.nodes[first - 1].link("up")
    _finish(_train(lab, then, *words))
    every_row_once(lab, ROWS)
