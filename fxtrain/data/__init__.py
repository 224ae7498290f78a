"""Data: index arithmetic and the sharded loader."""

from fxtrain.data.sharded_loader import Sharded, shard

__all__ = ["Sharded", "shard"]
