"""What the core calls in the packages that stand on it, by name.

The core imports none of them. It calls `_extensions.quantized_tensors(module)`, and the stub beside
this file, `_extensions.pyi`, says which module has the name. That module is imported on first use.
"""

from collections.abc import Callable, Collection
from typing import Any

from fxtrain._other_names import answers_of
from fxtrain._stubs import homes_of, load_name

_HOMES = homes_of(__file__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = load_name(_HOMES[name], name)
    globals()[name] = value  # found once; later look-ups cost nothing
    return value


def offers(package: str, names: Collection[str]) -> Callable[[str], Any]:
    """A `__getattr__` of a package of the core, for public names that another package has."""
    answer = answers_of(package, names)
    return lambda name: __getattr__(name) if name in names else answer(name)
