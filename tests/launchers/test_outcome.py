"""The report of a launch that failed."""

import json
import signal
import traceback

import torch

import fxtrain as fx
from fxtrain.launchers import Failure, LaunchResult, describe
from fxtrain.launchers.outcome import by_cause, find_failures, keep_tracebacks


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


def test_a_rank_that_could_not_connect_is_no_cause_of_another_rank_s_error():
    late = Failure(
        rank=0, kind="fxtrain.errors.ContextError", error="ContextError: late. [FX102]", time_ns=1
    )
    own = Failure(rank=1, kind="ValueError", error="ValueError: mine", time_ns=2)
    assert by_cause([late, own]) == (own, late)


def test_an_error_that_quotes_another_rank_s_is_no_cause():
    kind, text = "fxtrain.errors.DataError", "DataError: rank 1: Row 7 is empty. [FX400]"
    quotes, own = (Failure(rank=n, kind=kind, error=text, time_ns=n) for n in (0, 1))
    assert by_cause([quotes, own]) == (own, quotes)


def test_ranks_that_the_launcher_ended_are_no_cause(tmp_path):
    """Such as rank 1, which hung, and rank 2, whose script exits with a code at SIGTERM."""
    reports = {
        0: {"message": "CollectiveError: 1 never joined", "kind": "fxtrain.errors.CollectiveError"},
        2: {"message": "", "code": 5},
    }
    for rank, report in reports.items():
        extra = {"rank": rank, "time_ns": 9 - rank, "code": 1, **report}
        text = json.dumps({"message": {"message": report["message"], "extraInfo": extra}})
        (tmp_path / f"{rank}.json").write_text(text)
    codes = {0: 1, 1: -signal.SIGKILL, 2: 5, 3: -signal.SIGTERM}
    failures = find_failures(codes, tmp_path.iterdir(), stopped=(1, 2, 3))
    result = LaunchResult(ranks=4, failures=failures)
    assert result.code == 1
    first, *others = describe(result).splitlines()
    assert first == "Rank 0 of 4 failed: CollectiveError: 1 never joined"
    assert others == [
        "Rank 1 of 4 was still running when another rank failed. It did not exit after SIGTERM, so "
        "the launcher killed it."
    ]


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
