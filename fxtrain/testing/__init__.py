"""Tools to test distributed code: pools of real ranks, fake ranks in one process, counts of
collectives, and the laws of strategies."""

from fxtrain.testing.cluster import Cluster, RankFailure, free_port
from fxtrain.testing.growth import Cost, costs_of, grows_linearly
from fxtrain.testing.laws import LAWS, Law, Terms, all_at_once
from fxtrain.testing.traffic import Collective, Traffic, count_collectives
from fxtrain.testing.training import Run, Task, by_hand, fake_world, on_ranks
from fxtrain.testing.transformer import Transformer

__all__ = [
    "Cluster",
    "Collective",
    "Cost",
    "LAWS",
    "Law",
    "RankFailure",
    "Run",
    "Task",
    "Terms",
    "Traffic",
    "Transformer",
    "all_at_once",
    "by_hand",
    "costs_of",
    "count_collectives",
    "fake_world",
    "free_port",
    "grows_linearly",
    "on_ranks",
]
