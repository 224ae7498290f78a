"""The report of a launch that failed."""

import traceback

import torch

import fxtrain as fx
from fxtrain.launchers import Failure, LaunchResult, describe
from fxtrain.launchers.outcome import keep_tracebacks


def _failure(call):
    """What a rank reports of the error that a call raises."""
    try:
        call()
    except Exception as error:
        kind = type(error)
        return Failure(
            rank=1,
            code=1,
            kind=f"{kind.__module__}.{kind.__qualname__}",
            error=f"{kind.__qualname__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )


def _refused():
    with fx.detect(env={}, device="cpu") as ctx:
        fx.save("runs/a", ctx, torch.nn.Linear(2, 1))


def _own():
    raise ValueError("of my own\nin two lines")


def test_the_message_is_shown_first_and_once():
    text = describe(LaunchResult(ranks=2, failures=(_failure(_own),)))
    assert text.startswith(
        "Rank 1 of 2 failed: ValueError: of my own\nin two lines\nTraceback (most recent call last)"
    )
    assert text.count("of my own\\nin") == 1  # the line of code
    assert text.count("in two lines") == 2
    assert text.splitlines()[-1] == '    raise ValueError("of my own\\nin two lines")'


def _trained_twice():
    with fx.detect(env={}, device="cpu") as ctx:
        net = torch.nn.Linear(2, 1)
        model = fx.wrap(net, ctx, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        loss = model(torch.ones(1, 2)).square().mean()
        for _ in range(2):
            fx.update(ctx, fx.batch(torch.ones(1, 2), ctx), model, loss)


def _refused_for_a_cause():
    try:
        _own()
    except ValueError as error:
        raise fx.errors.DataError("refused") from error


def test_a_cause_is_shown_if_a_frame_of_it_is_not_of_fxtrain_or_torch():
    text = describe(LaunchResult(ranks=2, failures=(_failure(_trained_twice),)))
    assert ", in _trained_twice\n" in text and text.count("Traceback (most recent") == 1
    assert "autograd" not in text and "direct cause" not in text
    text = describe(LaunchResult(ranks=2, failures=(_failure(_refused_for_a_cause),)))
    assert ", in _own\n" in text and "direct cause" in text
    assert text.count("Traceback (most recent") == 2


def test_frames_of_the_library_are_left_out_of_its_errors(tmp_path):
    failure = _failure(_refused)
    assert "fxtrain/checkpoint" in failure.traceback
    result = LaunchResult(ranks=2, failures=(failure,))
    text = describe(result)
    assert text.startswith(
        f"Rank 1 of 2 failed: {failure.error}\nTraceback (most recent call last)"
    )
    assert text.count(failure.error) == 1
    assert "fxtrain/checkpoint" not in text and ", in _refused\n" in text
    place = keep_tracebacks(result, str(tmp_path))
    assert (place / "1.txt").read_text() == failure.traceback
