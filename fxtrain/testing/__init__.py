"""Tools to test distributed code: pools of real ranks, fake ranks in one process, counts of
collectives, and the laws of strategies."""

from fxtrain.testing.cluster import Cluster, RankFailure, free_port
from fxtrain.testing.laws import LAWS, Law, Terms, all_at_once
from fxtrain.testing.traffic import Collective, Traffic, count_collectives
from fxtrain.testing.training import Run, Task, fake_world, on_ranks, reference
from fxtrain.testing.transformer import Transformer

__all__ = [
    "Cluster",
    "Collective",
    "LAWS",
    "Law",
    "RankFailure",
    "Run",
    "Task",
    "Terms",
    "Traffic",
    "Transformer",
    "all_at_once",
    "count_collectives",
    "fake_world",
    "free_port",
    "on_ranks",
    "reference",
]
__dir__ = __all__.copy  # for completion
