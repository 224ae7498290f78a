"""Calls that do not fit: every public callable names what it was given and what it takes."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxtrain as fx

_PLACES = ("fx", "fx.ops", "fx.checkpoint", "fx.meters", "fx.quality")
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MANY = (inspect.Parameter.VAR_POSITIONAL,)


def _callables() -> Iterator[Any]:
    for place in _PLACES:
        module = eval(place, {"fx": fx})
        for name in module.__all__:
            value = getattr(module, name)
            of_python = inspect.isclass(value) and issubclass(value, tuple)  # a NamedTuple
            if callable(value) and not of_python:
                yield pytest.param(value, id=f"{place}.{name}")


EVERY = pytest.mark.parametrize("call", list(_callables()))


def _form(call: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(call).parameters.values())


def _names(call: Any) -> set[str]:
    """Names that a message may have for it: that of an alias, or of what makes it."""
    name = call.__name__.rpartition(".")[2]  # a package that can be called has dots
    return {name, name.lower()}


def _told(call: Any, *args: object, **kwargs: object) -> str:
    with pytest.raises(fx.FxError) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, TypeError) and caught.value.code == "FX002"
    told = caught.value.message
    assert any(told.startswith(name) or f".{name}" in told for name in _names(call)), told
    return told


def _has_form(told: str) -> bool:
    """Whether a message says what is accepted."""
    forms = ("Use ", "It has ", "It takes ", "takes ", "Pass ", "Did you mean ")
    return any(one in told for one in forms)


@EVERY
def test_an_unknown_keyword(call: Any):
    told = _told(call, purple=1)
    assert "purple" in told and _has_form(told)


@EVERY
def test_one_positional_argument_too_many(call: Any):
    form = _form(call)
    if any(one.kind in _MANY for one in form):
        return  # takes any number of them
    given = sum(one.kind in _BY_POSITION for one in form) + 1
    told = _told(call, *(object() for _ in range(given)))
    assert ("too many" in told or "object" in told) and _has_form(told)


@EVERY
def test_missing_arguments(call: Any):
    needed = [one for one in _form(call) if one.default is one.empty and one.kind not in (2, 4)]
    if not needed:
        return
    told = _told(call)
    assert ("missing" in told or "found nothing" in told) and _has_form(told)


@EVERY
def test_an_argument_by_position_and_by_name(call: Any):
    form = _form(call)
    if not form or form[0].kind not in _BY_POSITION:
        return
    told = _told(call, object(), **{form[0].name: object()})
    assert form[0].name in told and _has_form(told)


def _error_classes() -> list[type[fx.FxError]]:
    return [getattr(fx, name) for name in fx.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("kind", _error_classes())
def test_an_error_takes_texts_and_a_code(kind: type[fx.FxError]):
    made = kind("one", code="FX002")
    assert made.message == "one" and made.code == "FX002"


def test_what_fits_is_made_as_before():
    one = torch.ones(())
    assert fx.Weighted(one, weight=2) == fx.Weighted(weight=2, total=one)
    assert fx.Mean(6.0, weight=2).total == fx.Mean(weight=2, total=6.0).total == 6.0
    mean = fx.Mean().update(value=3.0, weight=2).update(1.0, weight=2).update(value=2.0)
    assert (mean.total, mean.weight) == (10.0, 5)
    with pytest.raises(fx.DataError, match=r"mean\.update.*found float, value=float"):
        fx.Mean().update(1.0, value=1.0)  # type: ignore[misc]
