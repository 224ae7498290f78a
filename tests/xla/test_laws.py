"""XLA on CPU devices gives what one process on torch gives."""

import json

import pytest

import fxtrain as fx
from fxtrain.testing import LAWS, Terms
from tests.launched._run import PYTHON, ROOT, run
from tests.xla.conftest import ALONE, SPMD

pytestmark = [pytest.mark.xla, pytest.mark.timeout(400)]

# XLA rounds in another order than torch, and keeps some constants of float64 in float32.
TERMS = Terms(rtol=1e-8, atol=1e-9, fp16=False, exact=False)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_four_devices(spmd, law):
    law(spmd, fx.Plan(strategy=fx.XLA()), terms=TERMS)


# Most of the time goes into compiling: on one device a few laws have to do.
@pytest.mark.parametrize("law", [LAWS[0], LAWS[-1]], ids=lambda law: law.__name__)
def test_one_device(alone, law):
    law(alone, fx.Plan(strategy=fx.XLA(), accumulate=2), terms=TERMS)


def test_recomputed_blocks(spmd):
    LAWS[0](spmd, fx.Plan(strategy=fx.XLA(), recompute=("Block",)), terms=TERMS)


def test_the_digits_example_is_as_good_as_on_torch():
    scores = {}
    for name, env in {"torch": {}, "alone": ALONE, "spmd": SPMD}.items():
        words = ("--strategy", "xla") if env else ()
        ended = run(*PYTHON, str(ROOT / "examples" / "digits.py"), *words, timeout_s=120, **env)
        assert ended.code == 0, ended.err
        scores[name] = json.loads(ended.out.strip().splitlines()[-1])["accuracy"]
    assert scores["torch"] >= 0.93
    assert scores["alone"] == pytest.approx(scores["torch"], abs=0.015)
    assert scores["spmd"] == pytest.approx(scores["torch"], abs=0.015)
