"""The decorators that answer wrong arguments: what they refuse, and what they leave alone."""

import inspect

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain._arguments import MISSING, hot_arguments, in_order, known_arguments


@hot_arguments
def _three(first, second, third, *more, **unknown):
    return first, second, third, more, unknown


def test_arguments_by_name_are_put_in_order():
    assert _three(1, 2, 3) == (1, 2, 3, (), {})
    *given, more, unknown = _three(1, third=3, second=2)
    assert in_order(_three, (*given, *more), unknown) == (1, 2, 3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1, 2), {}),
        ((1, 2, 3), {}),  # nothing to put in order
        ((1, 2), {"first": 3}),
        ((1, 2, 3), {"third": 3}),
        ((1, 2, 3, 4), {"fourth": 5}),
        ((1, 2), {"third": 3, "fourth": 4}),
        ((), {"first": 1, "third": 3}),
    ],
)
def test_other_arguments_are_not(args, kwargs):
    *given, more, unknown = _three(*args, **kwargs)
    assert in_order(_three, (*given, *more), unknown) == ()


def test_optional_arguments_of_a_hot_function_keep_their_defaults():
    @hot_arguments
    def scaled(value, by=2, *more, **unknown):
        return value, by

    assert scaled() == (MISSING, 2)
    assert list(inspect.signature(scaled).parameters) == ["value", "by"]


def test_a_hot_function_that_could_not_refuse_arguments_is_refused():
    with pytest.raises(TypeError, match=r"plain has no \*more and \*\*unknown"):

        @hot_arguments
        def plain(first, **unknown):
            return first, unknown


def test_a_step_and_an_update_take_their_arguments_by_name():
    with fx.detect({}, device="cpu") as ctx:
        sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=sgd)
        fns = fx.StepFns(model, lambda model, batch: model(batch.data).mean())
        first, second = fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx)
        assert fx.step(fns=fns, ctx=ctx, batch=first).position.updates == 1
        loss = model(second.data).mean()
        assert fx.update(ctx, second, loss=loss, model=model).position.updates == 2


def greet(ctx, fn):
    return fn(ctx)


_checked = known_arguments(fx.PlanError)(greet)


def test_an_error_of_a_users_function_is_kept():
    def fails(ctx):
        raise TypeError("of the user's own")

    with fx.detect({}, device="cpu") as ctx, pytest.raises(TypeError, match=r"own$"):
        _checked(ctx, fails)
    # Where the arguments are wrong too, both are shown.
    with pytest.raises(fx.PlanError, match=r"ctx is a context from fx\.detect") as caught:
        _checked(object(), fails)
    assert str(caught.value.__cause__) == "of the user's own"


def test_a_call_that_does_not_fit_has_no_other_cause():
    with pytest.raises(fx.PlanError, match="ctx and fn are missing") as caught:
        _checked()
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
