"""Arguments that a call lacks, or that nothing has: an error that says what to use."""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, cast

from fxtrain._display import counted
from fxtrain._errors import (
    CheckpointError,
    CollectiveError,
    ContextError,
    DataError,
    FxError,
    LaunchError,
    PlanError,
    StepError,
)
from fxtrain._other_names import field_hint

__all__ = ["closest", "known_arguments", "unknown_name", "with_known_arguments"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_MAX_COMPARED = 200  # letters: the time grows with their square


class _PlanArgumentError(PlanError, TypeError):
    """An unknown argument of a plan, a config, or a function that takes them."""

    code = "FX002"


class _LaunchArgumentError(LaunchError, TypeError):
    """An unknown argument of a launch."""

    code = "FX002"


class _StepArgumentError(StepError, TypeError):
    """An unknown argument of what makes a step."""

    code = "FX002"


class _DataArgumentError(DataError, TypeError):
    """An unknown argument of what splits data."""

    code = "FX002"


class _ContextArgumentError(ContextError, TypeError):
    """An unknown argument of what makes a context."""

    code = "FX002"


class _CollectiveArgumentError(CollectiveError, TypeError):
    """An unknown argument of a function of `fxtrain.ops`."""

    code = "FX002"


class _CheckpointArgumentError(CheckpointError, TypeError):
    """An unknown argument of what saves or restores."""

    code = "FX002"


_ARGUMENT_ERRORS: Mapping[type[FxError], type[FxError]] = types.MappingProxyType(
    {
        PlanError: _PlanArgumentError,
        LaunchError: _LaunchArgumentError,
        StepError: _StepArgumentError,
        DataError: _DataArgumentError,
        ContextError: _ContextArgumentError,
        CollectiveError: _CollectiveArgumentError,
        CheckpointError: _CheckpointArgumentError,
    }
)


def known_arguments(error: type[FxError]) -> Callable[[F], F]:
    """A decorator: an unknown or missing argument is an error that says what to use.

    Args:
        error: What is raised, which is a TypeError too.
    """
    raised = _ARGUMENT_ERRORS[error]

    def decorate(function: F) -> F:
        # An `__init__` has the name of its class before the last dot.
        call = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        code: Any = cast(Any, inspect.unwrap(function)).__code__
        most = code.co_argcount
        names = code.co_varnames[: most + code.co_kwonlyargcount]
        known = dict.fromkeys(name for name in names if name != "self").keys()
        needed = _needed(function, known)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known:
                name = next(name for name in kwargs if name not in known)
                raise raised(unknown_name(call, name, known))
            if len(args) > most:
                first = names[most] if len(names) > most else ""
                raise raised(
                    f"{call}: {counted(len(args) - most, 'positional argument')} too many. "
                    + (f"Pass {call}({first}=...) and what follows by name." if first else "")
                )
            try:
                return function(*args, **kwargs)
            except TypeError:
                missing = needed.keys() - kwargs.keys() - {*names[: len(args)]}
                if not missing:
                    raise
            raise raised(_missing_words(call, needed, missing))

        return cast(F, checked)

    return decorate


def with_known_arguments(error: type[FxError]) -> Callable[[type[T]], type[T]]:
    """A decorator of a class made by attrs: its `__init__` gets `known_arguments`."""

    def decorate(cls: type[T]) -> type[T]:
        made: Any = cls
        made.__init__ = known_arguments(error)(made.__init__)
        return cls

    return decorate


def _needed(function: Callable[..., Any], known: Collection[str]) -> dict[str, str]:
    """The arguments without a default, each as it is written in a call."""
    kinds = inspect.signature(function).parameters.values()
    by_name = inspect.Parameter.KEYWORD_ONLY
    return {
        one.name: f"{one.name}=..." if one.kind is by_name else one.name
        for one in kinds
        if one.name in known and one.default is one.empty
    }


def _missing_words(call: str, needed: Mapping[str, str], missing: Collection[str]) -> str:
    """What to say of arguments that a call lacks."""
    lacks = " and ".join(name for name in needed if name in missing)
    are = "is" if len(missing) == 1 else "are"
    return f"{call}: {lacks} {are} missing. Use {call}({', '.join(needed.values())})."


def unknown_name(owner: str, name: str, known: Collection[str]) -> str:
    """What to say of an argument that a record or a function does not have."""
    found = field_hint(owner, name, known) or closest(name, known)
    listed = "" if found else f" It has {', '.join(known)}."
    return f"{owner}({name}=...): no such argument.{found}{listed}"


def closest(value: Any, choices: Iterable[str]) -> str:
    """A question after the choice that is spelt most like a value; empty without one."""
    word = value[:_MAX_COMPARED] if isinstance(value, str) else ""
    near = difflib.get_close_matches(word, choices, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
