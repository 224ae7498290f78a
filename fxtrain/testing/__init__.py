"""What tests of distributed code need: real ranks in a pool, fake ranks in one process, a
count of what the ranks say to each other, and the laws of strategies."""

from fxtrain.testing._cluster import Cluster, RankFailure, free_port
from fxtrain.testing._fake import fake_world
from fxtrain.testing._growth import Cost, costs_of, grows_linearly
from fxtrain.testing._laws import LAWS, Law, Terms
from fxtrain.testing._traffic import Collective, Traffic, count_collectives
from fxtrain.testing._train import Run, Task, by_hand, on_ranks
from fxtrain.testing._transformer import Transformer

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
    "by_hand",
    "costs_of",
    "count_collectives",
    "fake_world",
    "free_port",
    "grows_linearly",
    "on_ranks",
]
