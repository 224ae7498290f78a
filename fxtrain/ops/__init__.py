"""Collectives over trees, agreement, process control, random state, parts of a step.

Value first, context after: `ops.gather(tree, ctx)`.
"""

from typing import TYPE_CHECKING

from fxtrain import _extensions
from fxtrain.ops.collectives import broadcast, gather, reduce
from fxtrain.ops.connecting import close, detect
from fxtrain.ops.control import Preemption, main_first, on_main, on_rank, preemption, say
from fxtrain.ops.devices import fork_rng, seed
from fxtrain.ops.logs import RankLogger, log
from fxtrain.ops.objects import (
    agree,
    all_ranks,
    any_rank,
    barrier,
    broadcast_object,
    gather_objects,
)
from fxtrain.ops.opening import duplicate
from fxtrain.ops.padding import Padded, gather_valid, pad, unpad
from fxtrain.ops.padding import gather_valid as gather_for_metrics
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.schedules import schedule
from fxtrain.ops.splitting import scatter, split
from fxtrain.ops.step_parts import (
    apply,
    autocast,
    average,
    backward,
    clip_norm,
    clip_value,
    scale_grads,
    sync,
)
from fxtrain.ops.whole_tensors import save

if TYPE_CHECKING:
    from fxtrain._extensions import join_tokens, map, restarting, token_positions

print = say  # not in __all__, since a star import would hide Python's own

__all__ = [
    "Padded",
    "Preemption",
    "RankLogger",
    "agree",
    "all_ranks",
    "any_rank",
    "apply",
    "autocast",
    "average",
    "backward",
    "barrier",
    "broadcast",
    "broadcast_object",
    "clip_norm",
    "clip_value",
    "close",
    "detect",
    "duplicate",
    "fail_together",
    "fork_rng",
    "gather",
    "gather_for_metrics",
    "gather_objects",
    "gather_valid",
    "join_tokens",
    "log",
    "main_first",
    "map",
    "on_main",
    "on_rank",
    "pad",
    "preemption",
    "reduce",
    "restarting",
    "save",
    "say",
    "scale_grads",
    "scatter",
    "schedule",
    "seed",
    "split",
    "sync",
    "token_positions",
    "unpad",
]

__dir__ = __all__.copy  # for completion
if not TYPE_CHECKING:  # for which every name would exist
    __getattr__ = _extensions.offers(__name__, __all__)
