"""What tests of distributed code need: real ranks in a pool, fake ranks in one process, and a
count of what the ranks say to each other."""

from fxtrain.testing._cluster import Cluster, RankFailure, free_port
from fxtrain.testing._fake import fake_world
from fxtrain.testing._traffic import Collective, Traffic, count_collectives

__all__ = [
    "Cluster",
    "Collective",
    "RankFailure",
    "Traffic",
    "count_collectives",
    "fake_world",
    "free_port",
]
