"""Sends calls and values to another process: by name where possible, by value otherwise."""

import contextlib
import importlib
import io
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fxtrain._optional import optional

# What pickle raises for a lambda, a local function or class, a lock, a generator.
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


def is_interactive(main: ModuleType | None = None) -> bool:
    """Whether the main module is a notebook, a prompt or standard input, not a file.

    Another process cannot import its definitions.
    """
    module = sys.modules["__main__"] if main is None else main
    file = getattr(module, "__file__", None)
    named = getattr(module, "__spec__", None) is not None
    return not named and (file is None or not Path(file).exists())


def pack(value: Any, *, interactive: bool) -> bytes:
    """Turn a value into bytes that pickle reads.

    Args:
        value: Any value, including functions.
        interactive: Whether definitions of the main module must be sent by value.

    Raises:
        MissingPackageError: this needs cloudpickle, which is not installed.
    """
    with contextlib.suppress(*UNPICKLABLE):
        data = pickle.dumps(value)
        if not (interactive and b"__main__" in data):
            return data
    return _by_value(value, optional("cloudpickle", extra="notebook", needed_by="fx.launch"))


def _by_value(value: Any, cloudpickle: ModuleType) -> bytes:
    class Pickler(cloudpickle.Pickler):
        # cloudpickle sends only plain modules by name. It takes `ops` beside `torch` in a function
        # for torch.ops, which has another type; modules of other types are sent by name too.
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:
                return importlib.import_module, (obj.__name__,)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
