"""Names of other libraries and launchers, and what each is called here.

The names are data, in `_other_names.toml`, which is read when an error is being made. They are
those of Accelerate, of Fabric and Lightning, of `TrainingArguments` of transformers, and of torch.
"""

import difflib
import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

_SETTINGS = ("argument", "flag", "key")
_CALLS = ("class", "method")
_MAX_COMPARED = 200  # letters: the time grows with their square
_LIKE = 0.75  # of the letters of two names that may be one name and its misspelling


class OtherName(NamedTuple):
    """A name of another library, and what to write here."""

    library: str
    kind: str  # class, method, argument, flag, key, or value
    name: str  # after an owner and a dot if only that owner is asked for it
    use: str = ""  # in a script, or on the command line for what a launch decides
    path: str = ""  # the field in a launch file; empty if no file has it
    none: str = ""  # why there is no counterpart, in place of `use`


def other_names() -> tuple[OtherName, ...]:
    """Every name of the table."""
    return tuple(
        OtherName(library, kind, name, **_answer(answer))
        for library, kinds in _table().items()
        if library != "prefixes"
        for kind, rows in kinds.items()
        for names, answer in rows.items()
        for name in names.split()
    )


def setting(name: str) -> OtherName | None:
    """What a name is as an argument, a flag, or a key: as it is, or without its prefix."""
    entry = _find(name, _SETTINGS)
    prefix = next((start for start in _table()["prefixes"] if name.startswith(start)), "")
    return entry or (_find(name.removeprefix(prefix), _SETTINGS) if prefix else None)


def hint(name: object, *, at: Literal["script", "file", "command"] = "script") -> str:
    """A sentence on what a name of another library is called here; empty for other names.

    Example:
        >>> from fxtrain._other_names import hint
        >>> hint("max_grad_norm")
        ' Use fx.Plan(clip_norm=1.0).'
        >>> hint("max_grad_norm", at="file")
        ' Use plan.clip_norm.'
        >>> hint("--nproc-per-node", at="command")
        ' Use fxtrain launch --ranks 2 train.py.'
        >>> hint("--fsdp_use_orig_params", at="command")
        ' FSDP2 always does this.'
    """
    word = name.lstrip("-").replace("-", "_").lower() if isinstance(name, str) else ""
    entry = setting(word)
    if entry is None or entry.none:
        return f" {entry.none}" if entry else ""
    if at == "file" and entry.path:
        return f" Use {entry.path}."
    is_launch = entry.use.startswith("fxtrain ")
    if at == "command" and entry.path and not is_launch:
        here = f"{entry.path} in a launch file, or --set {entry.path}=..."
        return f" Use {entry.use} in the script, {here}."
    return f" Use {entry.use}{'' if at == 'script' or is_launch else ' in the script'}."


def field_hint(owner: str, name: str, known: Collection[str]) -> str:
    """As `hint`, of an argument of a record or a function: its own field, if it has one.

    Example:
        >>> from fxtrain._other_names import field_hint
        >>> field_hint("DDP", "find_unused_parameters", ["bucket_mib", "unused_parameters"])
        ' Use DDP(unused_parameters=...).'
        >>> field_hint("DDP", "max_grad_norm", ["bucket_mib", "unused_parameters"])
        ' Use fx.Plan(clip_norm=1.0).'
        >>> field_hint("reduce", "reduction", ["tree", "ctx", "op"])
        ' Use reduce(op="mean").'
    """
    if own := _find(f"{owner}.{name}", _SETTINGS):
        return f" {own.none}" if own.none else f" Use {owner}({own.use})."
    entry = setting(name)
    field = entry.path.rpartition(".")[2] if entry else ""
    return f" Use {owner}({field}=...)." if field in known and owner != "Plan" else hint(name)


def call_hint(name: str, owner: str = "") -> str:
    """As `hint`, of an attribute: of `fxtrain`, a context or a loader, or of an owner alone.

    Example:
        >>> from fxtrain._other_names import call_hint
        >>> call_hint("wait_for_everyone")
        ' Use fx.ops.barrier(ctx).'
    """
    entry = _find(f"{owner}.{name}", _CALLS) if owner else _find(name, _CALLS) or setting(name)
    return f" {entry.none or f'Use {entry.use}.'}" if entry else ""


def value_hint(field: str, value: object) -> str:
    """A sentence on what the value of a field in another library is here; else empty.

    Example:
        >>> from fxtrain._other_names import value_hint
        >>> value_hint("precision", "bf16-mixed")
        ' Use precision="bf16".'
    """
    plain = isinstance(value, str) or type(value).__name__ == "dtype" or value in (16, 32)
    word = str(value).lower().removeprefix("torch.") if plain else ""
    entry = _find(f"{field}.{word}", ("value",))
    return f" Use {field}={entry.use}." if entry else ""


def closest(value: Any, choices: Iterable[str]) -> str:
    """A question after the choice that has three quarters of a value's letters; else empty."""
    word = value[:_MAX_COMPARED] if isinstance(value, str) else ""
    choices = list(choices)
    near = difflib.get_close_matches(word, choices, 1, _LIKE)
    near = near or difflib.get_close_matches(word.lower(), choices, 1, _LIKE)
    return f" Did you mean {near[0]!r}?" if near else ""


def answers_of(module: str, known: Collection[str]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module, whose error for an unknown name says what to use instead."""

    def answer(name: str) -> NoReturn:
        # Python asks for the name of a submodule too, before it imports it.
        plain = name.startswith("_") or find_spec(f"{module}.{name}") is not None
        said = "" if plain else call_hint(name) or closest(name, known)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{said and '.'}{said}")

    return answer


@functools.cache  # a file of the package, which does not change
def _table() -> Mapping[str, Any]:
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    return MappingProxyType(importlib.import_module("tomllib").loads(text))


@functools.cache
def _by_name() -> Mapping[tuple[str, str], OtherName]:
    """By kind and name; of a name that several libraries have, the first."""
    names = {(entry.kind, entry.name): entry for entry in reversed(other_names())}
    return MappingProxyType(names)


def _find(name: str, kinds: Collection[str]) -> OtherName | None:
    known = _by_name()
    exact = next((known[kind, name] for kind in kinds if (kind, name) in known), None)
    patterns = (entry for entry in known.values() if "*" in entry.name and entry.kind in kinds)
    return exact or next((entry for entry in patterns if fnmatchcase(name, entry.name)), None)


def _answer(answer: Any) -> dict[str, str]:
    if isinstance(answer, dict):
        return answer
    use, path = (answer, "") if isinstance(answer, str) else answer
    return {"use": use, "path": path}
