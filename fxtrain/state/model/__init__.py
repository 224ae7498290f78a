"""What a wrapped model answers beside its own fields, and what a checkpoint stores of it."""

from fxtrain.state.model.module_names import CopyError, M_co, ModuleNames, check_open
from fxtrain.state.model.stored_state import FlatShard, ModelState, StateReader

__all__ = [
    "CopyError",
    "FlatShard",
    "M_co",
    "ModelState",
    "ModuleNames",
    "StateReader",
    "check_open",
]
