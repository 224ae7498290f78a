"""examples/pretrain: the same losses under every plan file, dense and with experts."""

import json
import tomllib

import pytest

from tests.launched._run import FXTRAIN, PYTHON, ROOT, run_fork

pytestmark = [pytest.mark.timeout(600), pytest.mark.examples]

FOLDER = ROOT / "examples" / "pretrain"
PLANS = {
    "dense": ("single", "fsdp", "fsdp_tp", "pp"),
    "moe": ("single", "fsdp", "fsdp_expert"),
}


def _told(*command):
    ended = run_fork(*command, timeout_s=500.0)
    assert ended.code == 0, ended.err
    return json.loads(ended.out.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrain")
    options = ("--to", str(folder), "--modules", "60", "--vocabulary", "1024", "--workers", "1")
    prepare = (*PYTHON, str(FOLDER / "prepare.py"), *options)
    counts = _told(*prepare)
    assert counts["code"] > counts["docs"] > 10 * counts["docs_held_out"] > 0
    assert _told(*prepare) == counts
    return folder


@pytest.mark.parametrize("kind", PLANS)
def test_every_plan_has_the_same_losses(data, kind, record_property):
    results = {}
    for name in PLANS[kind]:
        plan = FOLDER / "plans" / f"{name}.toml"
        options = ("--data", str(data), "--folder", str(data / f"{kind}-{name}"), "--model", kind)
        launch = (*FXTRAIN, "launch", "--config", str(plan), str(FOLDER / "train.py"), *options)
        told = _told(*launch, "--updates", "20", "--length", "64")
        record_property("example", f"pretrain {kind} {name} {json.dumps(told)}")
        assert told["ranks"] == tomllib.loads(plan.read_text())["launch"]["ranks"]
        assert told["held_out"] < 6.1 < 6.93  # that of guesses among 1024 tokens
        assert told["text"].startswith("def ")
        if kind == "moe":
            assert 1 <= told["busiest"] < 1.9  # 2 if every token took it
        results[name] = told
    for told in results.values():  # in bf16
        assert told["loss"] == pytest.approx(results["single"]["loss"], abs=3e-3)
        assert told["held_out"] == pytest.approx(results["single"]["held_out"], abs=3e-3)


SCALED = {"dense_7b": ("dense", "7b", 5e9), "moe_50b": ("moe", "50b", 9e9)}


@pytest.mark.parametrize("name", SCALED)
def test_plans_for_1024_ranks_fit(data, name, record_property):
    kind, size, most = SCALED[name]
    options = ("--data", str(data), "--model", kind, "--size", size, "--length", "4096")
    script = (str(FOLDER / "train.py"), *options, "--batch", "1024")
    plan = ("--json", "--world", "1024", "--config", str(FOLDER / "plans" / f"{name}.toml"))
    ended = run_fork(*FXTRAIN, "plan", *plan, *script, timeout_s=500.0)
    assert ended.code == 0, ended.err
    run = json.loads(ended.out)
    assert run["problems"] == []
    assert run["setup_peak"] < run["peak"] < most  # no rank ever has the whole model
    record_property("example", f"pretrain {name} {run['peak']}")
