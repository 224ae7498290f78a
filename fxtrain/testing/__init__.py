"""What tests of distributed code need: real ranks in a pool, fake ranks in one process."""

from fxtrain.testing._cluster import Cluster, RankFailure, free_port
from fxtrain.testing._fake import fake_world

__all__ = ["Cluster", "RankFailure", "fake_world", "free_port"]
