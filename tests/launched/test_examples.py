"""Every example, and the number with which it ends."""

import importlib.util
import json

import pytest

from tests.launched._run import FXTRAIN, ROOT, run_fork

pytestmark = pytest.mark.timeout(330)


def _needs(package):
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs {package}")


def _digits(told):
    assert told["accuracy"] >= 0.93


def _chars(told):
    assert told["last"] < 2.7 < 4 < told["first"]


def _by_hand(told):
    assert told["equal"] is True and told["updates"] > 10


def _distil(told):
    assert told["teacher"] >= 0.88 and told["student"] >= 0.82


def _gan(told):
    assert told["updates"] == 160 and told["apart"] <= (1e-9 if told["ranks"] > 1 else 0)


def _actor_critic(told):
    assert told["reward"] > -0.01 and told["apart"] <= (1e-9 if told["ranks"] > 1 else 0)


def _big_model(told):
    assert told["accuracy"] > 0.9 and told["equal"] is True


def _qlora(told):
    assert told["upright"] > 0.9 and told["before"] < 0.6 and told["after"] > 0.9
    assert told["trained"] < 12_000


CASES = [
    ("digits", 1, _digits),
    ("digits", 2, _digits),
    ("chars --updates 30", 2, _chars),
    ("by_hand", 2, _by_hand),
    ("distil", 2, _distil),
    ("big_model", 1, _big_model),
    ("big_model", 2, _big_model),
    ("gan", 1, _gan),
    ("gan", 2, _gan),
    ("actor_critic", 1, _actor_critic),
    ("actor_critic", 2, _actor_critic),
    pytest.param("qlora", 2, _qlora, marks=_needs("bitsandbytes")),
    pytest.param("qlora --peft", 1, _qlora, marks=[_needs("bitsandbytes"), _needs("peft")]),
]


@pytest.mark.parametrize(("words", "ranks", "check"), CASES)
def test_example(words, ranks, check, record_property):
    name, *options = words.split()
    script = str(ROOT / "examples" / f"{name}.py")
    ended = run_fork(*FXTRAIN, "launch", "--ranks", str(ranks), script, *options, timeout_s=300)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out.strip().splitlines()[-1])
    record_property("example", f"{words.replace(' ', ':')} {json.dumps(told)}")
    assert told["ranks"] == ranks
    check(told)
