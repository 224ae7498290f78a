"""Collectives over trees, agreement, process control, random state, parts of a step.

Value first, context after: `ops.gather(tree, ctx)`.
"""

from fxtrain.ops._collect import broadcast, gather, reduce
from fxtrain.ops._connect import close, detect
from fxtrain.ops._control import main_first, on_main, on_rank, say
from fxtrain.ops._duplicate import duplicate
from fxtrain.ops._log import RankLogger, log
from fxtrain.ops._objects import (
    agree,
    all_ranks,
    any_rank,
    barrier,
    broadcast_object,
    gather_objects,
    raise_together,
)
from fxtrain.ops._pad import Padded, pad, unpad
from fxtrain.ops._preempt import Preemption, preemption
from fxtrain.ops._random import fork_rng, seed
from fxtrain.ops._rows import gather_valid
from fxtrain.ops._scatter import scatter
from fxtrain.ops._split import split
from fxtrain.ops._tokens import join_tokens, token_positions
from fxtrain.ops._train import (
    apply,
    autocast,
    average,
    backward,
    clip_norm,
    clip_value,
    scale_grads,
    sync,
)

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
    "fork_rng",
    "gather",
    "gather_objects",
    "gather_valid",
    "join_tokens",
    "log",
    "main_first",
    "on_main",
    "on_rank",
    "pad",
    "preemption",
    "raise_together",
    "reduce",
    "say",
    "scale_grads",
    "scatter",
    "seed",
    "split",
    "sync",
    "token_positions",
    "unpad",
]
