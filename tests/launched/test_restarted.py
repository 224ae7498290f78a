"""A run that is started again and again, however it ended, is the run that was left alone."""

import json
import random
import signal

import pytest
import torch

from tests.launched._run import PYTHON, SCRIPTS, run_fork

UPDATES = 40
WAYS = ("SIGKILL", "SIGTERM", "breaks")


def _train(folder, *options):
    return run_fork(*PYTHON, str(SCRIPTS / "small_gpt.py"), str(folder), str(UPDATES), *options)


def _curve(folder):
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("loss", "grad_norm", "skipped", "lr")
    return [
        (entry["step"], entry["rows"], entry.get("epoch"), *map(entry["values"].get, kept))
        for entry in entries
        if "values" in entry  # not the plan of the run
    ]


@pytest.mark.slow
def test_ten_restarts_leave_one_curve_and_the_same_weights(tmp_path):
    assert _train(tmp_path / "alone").code == 0
    rng = random.Random(0)
    ways = [*WAYS * 3, "SIGKILL"]
    rng.shuffle(ways)
    for way in ways:
        batches, delay_s = rng.randint(1, 8), rng.uniform(0.0, 0.008)
        ended = _train(tmp_path / "run", way, str(batches), str(delay_s))
        assert ended.code == (-signal.SIGKILL if way == "SIGKILL" else 0), ended.err
        updates = [int(line) for line in ended.out.split()]
        assert len(updates) >= batches and updates[-1] < UPDATES  # it was left early
    assert _train(tmp_path / "run").code == 0
    alone = _curve(tmp_path / "alone")
    assert [step for step, *_ in alone] == list(range(1, UPDATES + 1))
    assert _curve(tmp_path / "run") == alone
    expected, weights = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "run"))
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
