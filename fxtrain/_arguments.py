"""Arguments that a call lacks, or that nothing has: an error that says what to use."""

import difflib
import functools
import inspect
import sys
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

__all__ = [
    "MISSING", "DataArgumentError", "PlanArgumentError", "StepArgumentError", "call_problem",
    "closest", "hot_arguments", "in_order", "known_arguments", "record_problem", "types_given",
    "unknown_name", "with_known_arguments",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_MAX_COMPARED = 200  # letters: the time grows with their square
_LIKE = 0.75  # of the letters of two names that may be one name and its misspelling


class _OfArguments:
    """What errors of arguments have in common: their code."""

    code = "FX002"


class PlanArgumentError(_OfArguments, PlanError, TypeError):
    """An unknown argument of a plan, a config, or a function that takes them."""


class LaunchArgumentError(_OfArguments, LaunchError, TypeError):
    """An unknown argument of a launch."""


class StepArgumentError(_OfArguments, StepError, TypeError):
    """An unknown argument of what makes a step."""


class DataArgumentError(_OfArguments, DataError, TypeError):
    """An unknown argument of what splits data."""


class ContextArgumentError(_OfArguments, ContextError, TypeError):
    """An unknown argument of what makes a context."""


class CollectiveArgumentError(_OfArguments, CollectiveError, TypeError):
    """An unknown argument of a function of `fxtrain.ops`."""


class CheckpointArgumentError(_OfArguments, CheckpointError, TypeError):
    """An unknown argument of what saves or restores."""


_ARGUMENT_ERRORS: Mapping[type[FxError], type[FxError]] = types.MappingProxyType(
    {
        PlanError: PlanArgumentError,
        LaunchError: LaunchArgumentError,
        StepError: StepArgumentError,
        DataError: DataArgumentError,
        ContextError: ContextArgumentError,
        CollectiveError: CollectiveArgumentError,
        CheckpointError: CheckpointArgumentError,
    }
)


class nothing:
    """The type of `MISSING`, whose name messages show."""


MISSING: Any = nothing()  # the default of required arguments of a function on the hot path

# Types of arguments, by the name that every function has for them.
_KINDS = {
    "ctx": ("DistContext",),
    "plan": ("Plan",),
    "batch": ("Batch",),
    "fns": ("StepFns",),
    "model": ("Wrapped",),
    "loader": ("Sharded", "DataLoader"),
}
# What takes nothing but its type, and what to say of it.
_ONLY = {
    "ctx": "a context from fx.detect()",
    "plan": "an fx.Plan",
    "batch": "a batch of a loader that fx.shard made",
    "fns": "fx.StepFns(model, loss)",
}

_WRITTEN = {"fns": "fx.StepFns(model, loss)"}  # in a line to write


class _Form:
    """How a function is called, for messages."""

    def __init__(self, function: Callable[..., Any], owner: str, use: str) -> None:
        # An `__init__` has the name of its class before the last dot.
        self.call = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        code: Any = cast(Any, inspect.unwrap(function)).__code__
        self.names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.bound = int("self" in self.names[:1])  # one argument that a caller does not write
        self.by_position = self.names[: code.co_argcount]
        self.most = sys.maxsize if code.co_flags & inspect.CO_VARARGS else code.co_argcount
        self.known = dict.fromkeys(name for name in self.names if name != "self").keys()
        self.needed = _needed(function, self.known)
        self.owner, self.module, self.use = owner, function.__module__, use

    def problem(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, types: bool) -> str:
        """What is wrong with a call; empty if its arguments fit.

        Args:
            types: Whether to name an argument that is of another type than its name says.
        """
        if misplaced := self._misplaced(args, kwargs):
            return misplaced
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        given.pop("self", None)
        kinds = {name: _kind_of(value) for name, value in given.items()}
        moved = [kind for name, kind in kinds.items() if kind in self.known and kind != name]
        moved = [kind for kind in moved if kinds.get(kind) != kind]
        missing = self._missing(given, kinds)
        if missing:
            are = "is" if len(missing) == 1 else "are"
            line = self._line(moved)
            line = f"{line[:-1]}, with ctx = fx.detect()." if "ctx" in missing else line
            return f"{self.call}: {' and '.join(missing)} {are} missing. {line}"
        if moved:
            found = ", ".join(type(value).__name__ for value in args[self.bound :])
            return f"{self.call}: arguments in the wrong order, found {found}. {self._line(moved)}"
        for name, wanted in _ONLY.items() if types and self.call[0].islower() else ():
            wrong = kinds.get(name, name) != name and given[name] is not None
            if wrong and (name in self.needed or name in ("ctx", "plan")):
                found = type(given[name]).__name__
                return f"{self.call}: {name} is {wanted}, found {found}. {self._line()}"
        return ""

    def _misplaced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What is wrong with the names of a call, or with the number of its arguments."""
        unknown = next((name for name in kwargs if name not in self.known), None)
        if unknown is not None:
            made = f" {self._line()}" if self.use else ""
            return f"{unknown_name(self.call, unknown, self.known)}{made}"
        if len(args) > self.most:
            first = self.names[self.most] if len(self.names) > self.most else ""
            many = counted(len(args) - self.most, "positional argument")
            by_name = f"Pass {self.call}({first}=...) and what follows by name."
            named = first and not self.use
            return f"{self.call}: {many} too many. {by_name if named else self._line()}"
        twice = next((name for name in self.by_position[: len(args)] if name in kwargs), None)
        if twice is None:
            return ""
        return f"{self.call}: {twice} was passed by position and by name. {self._line()}"

    def _missing(self, given: Mapping[str, Any], kinds: Mapping[str, str]) -> list[str]:
        """Needed arguments for which nothing was given, wherever what was given is written."""
        found = {kind for kind in kinds.values() if kind in self.known}
        missing = [name for name in self.needed if name not in found]
        places = [name for name in self.names[: self.most] if name in given]
        places += [name for name in self.needed if name in given and name not in places]
        # Values whose type says nothing of what they are meant for.
        loose = [name for name in places if kinds[name] not in self.known]
        here = [name for name in missing if name in loose and name not in _ONLY]
        maybe = [name for name in missing if name not in here and name not in _ONLY]
        at_last = [name for name in missing if name in loose and kinds[name] == ""]
        filled = [*here, *maybe, *[name for name in at_last if name in _ONLY]][: len(loose)]
        return [name for name in missing if name not in filled]

    def _line(self, moved: Collection[str] = ()) -> str:
        """The line to write."""
        if self.use:
            return f"Use {self.use}."
        shown = [_WRITTEN.get(name, text) for name, text in self.needed.items()]
        shown += [name for name in self.names if name in moved and name not in self.needed]
        return f"Use {self._home()}{self.call}({', '.join(shown)})."

    def _home(self) -> str:
        """What stands before the name of the function in a script."""
        if self.owner:
            return f"{self.owner}."
        if self.call in sys.modules["fxtrain"].__all__:
            return "fx."
        package = next((one for one in _PACKAGES if self.module.startswith(f"fxtrain.{one}.")), "")
        return f"fx.{package}." if package else ""


_PACKAGES = ("ops", "big", "checkpoint", "meters", "quality", "interop")


def _kind_of(value: Any) -> str:
    """The name that every function has for values of this type; empty for other types."""
    types = {one.__name__ for one in type(value).__mro__}
    return next((name for name, kinds in _KINDS.items() if not types.isdisjoint(kinds)), "")


def known_arguments(error: type[FxError], *, owner: str = "", use: str = "") -> Callable[[F], F]:
    """A decorator: an argument that is unknown, missing or misplaced is an error with the line.

    Args:
        error: What is raised, which is a TypeError too.
        owner: For a method, the name that an object has in the line to write.
        use: The line to write, where it is another call: that which returns such a record.
    """
    raised = _ARGUMENT_ERRORS[error]

    def decorate(function: F) -> F:
        form = _Form(function, owner, use)
        known, most = form.known, form.most

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= known or len(args) > most:
                raise raised(form.problem(args, kwargs, types=False))
            try:
                return function(*args, **kwargs)
            except Exception as error:
                problem = form.problem(args, kwargs, types=not isinstance(error, FxError))
                if not problem:
                    raise
                # An error from inside the function may be that of a user's own code.
                has_run = error.__traceback__ is not None and error.__traceback__.tb_next
                raise raised(problem) from (error if has_run else None)

        return cast(F, checked)

    return decorate


def hot_arguments(function: F) -> F:
    """A decorator as `known_arguments`, which adds no call to each call of the function.

    The last parameters of the function are `*more: Never, **unknown: Never`, to which a type
    checker allows no arguments; `inspect` and the documentation do not show them. Its required
    arguments get the default `MISSING`. The function itself refuses a call in which one of these
    is missing or one of those has something. What is passed by name to a parameter that takes
    arguments by position is in `unknown`, since Python would raise an error of its own if such an
    argument were there twice; `in_order` puts it in its place. For a method, optional arguments
    have the default `MISSING` too, so that it is known whether one was passed.
    """
    plain = cast(types.FunctionType, function)
    signature = inspect.signature(plain)
    shown = [one for one in signature.parameters.values() if one.kind not in _COLLECTORS]
    if len(signature.parameters) - len(shown) != len(_COLLECTORS):
        raise TypeError(f"{plain.__qualname__} has no *more and **unknown, which it could refuse.")
    cast(Any, plain).__signature__ = signature.replace(parameters=shown)
    code, given = plain.__code__, plain.__defaults__ or ()
    if "self" in code.co_varnames[:1]:
        plain.__defaults__ = (MISSING,) * (code.co_argcount - 1)
    else:
        plain.__defaults__ = (MISSING,) * (code.co_argcount - len(given)) + given
    by_name = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    plain.__kwdefaults__ = {**dict.fromkeys(by_name, MISSING), **(plain.__kwdefaults__ or {})}
    plain.__code__ = code.replace(co_posonlyargcount=code.co_argcount)
    return function


def in_order(
    function: Callable[..., Any], given: tuple[Any, ...], unknown: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a function with `hot_arguments`, of which some were passed by name.

    Args:
        given: By position, and `MISSING` for each that was not.

    Returns:
        All of them, optional ones with their defaults; nothing if one is missing, there twice or
        not known, or none was passed by name.
    """
    form = inspect.signature(function).parameters
    defaults = {one.name: one.default for one in form.values() if one.name != "self"}
    by_name = dict(unknown)
    placed = [
        by_name.pop(name, MISSING if default is inspect.Parameter.empty else default)
        if one is MISSING
        else one
        for (name, default), one in zip(defaults.items(), given, strict=False)
    ]
    fits = unknown and not by_name and len(given) == len(defaults)
    return tuple(placed) if fits and all(one is not MISSING for one in placed) else ()


_COLLECTORS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def types_given(args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
    """The types of the arguments of a call, for a message."""
    shown = [type(one).__name__ for one in args if one is not MISSING]
    shown += [f"{name}={type(one).__name__}" for name, one in kwargs.items()]
    return ", ".join(shown) or "nothing"


def call_problem(fn: Callable[..., object], *names: str) -> str:
    """Why a function that a user passes cannot be called with these arguments; empty if it can.

    Example:
        >>> from fxtrain._arguments import call_problem
        >>> call_problem(lambda batch: 0, "model", "batch")
        'it is called with (model, batch): too many positional arguments'
    """
    try:
        inspect.signature(fn).bind(*names)
    except TypeError as error:
        return f"it is called with ({', '.join(names)}): {error}"
    except ValueError:  # written in C, without a signature
        return ""
    return ""


def with_known_arguments(error: type[FxError], *, use: str = "") -> Callable[[type[T]], type[T]]:
    """A decorator of a class: its `__init__` gets `known_arguments`."""

    def decorate(cls: type[T]) -> type[T]:
        made: Any = cls
        made.__init__ = known_arguments(error, use=use)(made.__init__)
        return cls

    return decorate


def record_problem(
    cls: type,
    fields: Mapping[str, object],
    more: Collection[object],
    unknown: Iterable[str],
    use: str,
) -> str:
    """What is wrong with the arguments of a record with `hot_arguments` that takes names only.

    Args:
        fields: What each field was given, or `MISSING`.
        use: The call that returns such a record.
    """
    name = cls.__name__
    for one in unknown:
        return f"{unknown_name(name, one, fields)} Use {use}."
    if more:
        return f"{name}: {counted(len(more), 'positional argument')} too many. Use {use}."
    missing = [one for one, value in fields.items() if value is MISSING]
    are = "is" if len(missing) == 1 else "are"
    return f"{name}: {' and '.join(missing)} {are} missing. Use {use}."


def _needed(function: Callable[..., Any], known: Collection[str]) -> dict[str, str]:
    """The arguments without a default, each as it is written in a call."""
    kinds = inspect.signature(function).parameters.values()
    by_name = inspect.Parameter.KEYWORD_ONLY
    return {
        one.name: f"{one.name}=..." if one.kind is by_name else one.name
        for one in kinds
        if one.name in known and one.default is one.empty
    }


def unknown_name(owner: str, name: str, known: Collection[str]) -> str:
    """What to say of an argument that a record or a function does not have."""
    found = field_hint(owner, name, known) or _plan_hint(owner, name) or closest(name, known)
    takes = f"It has {', '.join(known)}." if known else "It takes no arguments."
    listed = "" if found else f" {takes}"
    return f"{owner}({name}=...): no such argument.{found}{listed}"


def _plan_hint(owner: str, name: str) -> str:
    """Where a field of a plan belongs, if it is given to a function instead."""
    if not owner[0].islower() or name not in sys.modules["fxtrain"].Plan.__slots__:
        return ""
    return f" It is a field of the plan: use fx.Plan({name}=...)."


def closest(value: Any, choices: Iterable[str]) -> str:
    """A question after the choice that has three quarters of a value's letters; else empty."""
    word = value[:_MAX_COMPARED] if isinstance(value, str) else ""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, 1, _LIKE)
    near = near or difflib.get_close_matches(word.lower(), choices, 1, _LIKE)
    return f" Did you mean {near[0]!r}?" if near else ""
