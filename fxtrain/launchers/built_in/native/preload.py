"""Imports torch into the launcher, for which every launch waits."""

import gc
import importlib
import sys
from typing import Any


def load_torch(name: str) -> Any:
    """A module of torch.

    Python's garbage collector runs repeatedly while torch creates its hundreds of thousands of
    objects, which takes a tenth of the import time and finds nothing.

    Effects:
        Imports the module. If torch was not imported before, all objects that exist after the
        import are exempt from garbage collection.

    Example:
        >>> from fxtrain.launchers import load_torch
        >>> load_torch("torch").__name__
        'torch'
    """
    if "torch" in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
