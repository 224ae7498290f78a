"""What a function of a model and a batch looks like, and what people pass in its place."""

import inspect
from collections.abc import Callable
from typing import Any

from torch.nn.modules.loss import _Loss

from fxtrain._arguments import call_problem
from fxtrain._errors import StepError

__all__ = ["EXAMPLE", "TORCH_FUNCTIONS", "check_no_criterion", "parameters_problem"]

EXAMPLE = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
TORCH_FUNCTIONS = "torch.nn.functional"

# What people call the arguments of a criterion.
_OUTPUTS = ("input", "inputs", "logits", "out", "output", "outputs", "pred", "preds", "scores")
_OUTPUTS += ("prediction", "predictions", "y_hat", "y_pred", "yhat")
_TARGETS = ("label", "labels", "target", "targets", "truth", "y", "y_true")


def check_no_criterion(call: str, fn: Any) -> None:
    """Refuse a loss of torch's, such as `nn.CrossEntropyLoss()`, as a function of model and batch.

    Args:
        call: What was asked, with braces for the loss.

    Raises:
        StepError: with the function that it should be.
    """
    given, criterion = "", "criterion"
    if isinstance(fn, _Loss):
        given = f"nn.{type(fn).__name__}()"
    elif isinstance(fn, type) and issubclass(fn, _Loss):
        given = f"nn.{fn.__name__}"
    elif getattr(fn, "__module__", "") == TORCH_FUNCTIONS:
        given = criterion = f"F.{fn.__name__}"
    if not given:
        return
    where = "" if criterion == given else f", where {criterion} = {given.removesuffix('()')}()"
    raise StepError(
        f"{call.format(given)}: this function takes (model, batch), and {given} takes outputs and "
        f"targets. Use lambda model, batch: {criterion}(model(batch[0]), batch[1]){where}."
    )


def parameters_problem(call: str, argument: str, fn: Callable[..., object]) -> str:
    """What is wrong with the parameters of a function of (model, batch), and what to pass.

    Empty if nothing seems to be. Names of parameters are no proof, so this explains the error
    of a call and refuses nothing by itself.

    Args:
        call: What was asked.
        argument: The name of the argument for the function.

    Example:
        >>> problem = parameters_problem("StepFns(loss=...)", "loss", lambda outputs, targets: 0)
        >>> problem.partition("; ")[2].partition(".")[0]
        'it is called with (model, batch), and this one takes (outputs, targets)'
    """
    problem, example = call_problem(fn, "model", "batch"), EXAMPLE
    if not problem:
        names = _parameters(fn)[:2]
        if len(names) < 2 or names[0] not in _OUTPUTS or names[1] not in _TARGETS:
            return ""
        problem = f"it is called with (model, batch), and this one takes ({', '.join(names)})"
        name = getattr(fn, "__name__", "")
        example = EXAMPLE.replace("F.cross_entropy", name) if name.isidentifier() else EXAMPLE
    return f"{call} takes a function; {problem}. For example: {argument}={example}."


def _parameters(fn: Callable[..., object]) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # written in C, without a signature
        return []
