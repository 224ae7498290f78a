"""Loading torch into the launcher, for which every launch waits."""

import gc
import importlib
import sys
from typing import Any

__all__ = ["load_torch"]


def load_torch(name: str) -> Any:
    """A module of torch.

    Python looks for rubbish again and again while torch makes its hundreds of thousands of
    objects, which takes a tenth of the time to load it and finds nothing.

    Effects:
        Imports the module. Where torch was not loaded before, what there is by then is never
        looked at by Python's garbage collector again.

    Example:
        >>> from fxtrain.launch import load_torch
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
