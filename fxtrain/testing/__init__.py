"""What tests of distributed code need: real ranks in a pool, fake ranks in one process."""

from fxtrain.testing._cluster import Cluster, RankFailure, free_port
from fxtrain.testing._fake import fake_world
from fxtrain.testing._laws import LAWS, Law
from fxtrain.testing._train import Run, Task, by_hand, on_ranks
from fxtrain.testing._transformer import Transformer

__all__ = [
    "Cluster",
    "LAWS",
    "Law",
    "RankFailure",
    "Run",
    "Task",
    "Transformer",
    "by_hand",
    "fake_world",
    "free_port",
    "on_ranks",
]
