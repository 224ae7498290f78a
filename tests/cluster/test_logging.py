"""Loggers of ranks: which rank is heard, and without a setup of logging."""

import subprocess
import sys
from pathlib import Path

import pytest

import fxtrain as fx
from tests._errors import raises_code


def test_logging_knows_its_rank(ctx, caplog):
    import attrs

    with caplog.at_level("INFO"):
        fx.ops.log(ctx).info("main %d", 1)
        fx.ops.log(attrs.evolve(ctx, rank=1)).info("hidden")
        fx.ops.log(attrs.evolve(ctx, rank=1)).info("loud", everyone=True)
    assert [r.getMessage() for r in caplog.records] == ["main 1", "[rank 1] loud"]
    assert caplog.records[0].filename == Path(__file__).name


@pytest.mark.parametrize("rank", [0, 1])
def test_unknown_keywords_are_an_error_on_every_rank(ctx, rank):
    import attrs

    answers = {"main_process_only": "info", "in_order": "fx.ops.say", "foo": "argument"}
    for name, answer in answers.items():
        with pytest.raises(TypeError, match=f"(?=.*{name}).*{answer}"):
            fx.ops.log(attrs.evolve(ctx, rank=rank)).debug("never shown", **{name: True})


def test_keywords_of_the_standard_library_reach_it(ctx, caplog):
    try:
        raise KeyError("x")
    except KeyError:
        fx.ops.log(ctx).exception("failed", extra={"run": "a"})
    assert caplog.records[0].exc_info[0] is KeyError
    assert caplog.records[0].run == "a"


@pytest.mark.parametrize("wrong", [{"loss": 1}, None, "loss"])
def test_a_logger_wants_a_context(wrong):
    with raises_code("FX100", "fx.ops.log(ctx)"):
        fx.ops.log(wrong)


def test_a_logger_wants_a_name(ctx):
    with raises_code("FX100", "name=3"):
        fx.ops.log(ctx, 3)


SPEAKING = """
import logging, sys, attrs, fxtrain as fx
with fx.detect(env={}, device="cpu") as ctx:
    fx.ops.log(ctx).info("main %d", 1)
    fx.ops.log(ctx).debug("detail")
    other = attrs.evolve(ctx, rank=1)
    fx.ops.log(other).info("silent")
    fx.ops.log(other).info("asked", everyone=True)
    logging.getLogger("fxtrain").setLevel("ERROR")
    fx.ops.log(ctx).warning("below the user's level")
    logging.basicConfig(format="user: %(message)s", level="INFO")
    fx.ops.log(ctx, "mine").info("by the user's handler")
"""


@pytest.mark.slow
def test_the_main_rank_is_heard_without_a_setup_of_logging():
    done = subprocess.run(
        [sys.executable, "-c", SPEAKING], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr.splitlines() == ["main 1", "[rank 1] asked", "user: by the user's handler"]
