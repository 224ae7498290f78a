"""Distributed PyTorch training loops made of values and functions.

The public names are those of `__init__.pyi`. They load on first use, so that the command line can
answer without importing torch.
"""

import importlib
from typing import Any

from fxtrain._stubs import homes_of, load_name
from fxtrain._version import __version__ as __version__

_HOMES = homes_of(__file__)  # "fxtrain" is the home of modules themselves
_MODULES = [name for name, home in _HOMES.items() if home == __name__]

__all__ = sorted({*_HOMES} - {*_MODULES, "__version__"} | {"ops", "state"})  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fxtrain.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fxtrain' has no attribute {name!r}{_instead_of(name)}")
    value = load_name(_HOMES[name], name)
    globals()[name] = value  # found once; later look-ups cost nothing
    return value


def _instead_of(name: str) -> str:
    """What to use instead of a name; a question after the nearest, or nothing."""
    if name.startswith("_"):
        return ""
    names = importlib.import_module("fxtrain._other_names")
    homes = (
        home for home in _MODULES if name in importlib.import_module(f"fxtrain.{home}").__all__
    )
    hint = names.call_hint(name)
    if not hint and (home := next(homes, None)):
        hint = f" Use fx.{home}.{name}."
    hint = hint or names.closest(name, __all__)
    return f".{hint}" if hint else ""


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
