"""Data: index arithmetic and the sharded loader."""

from fxtrain.data.sharded_loader import Sharded
from fxtrain.data.sharding import every_row, shard

__all__ = ["Sharded", "every_row", "shard"]
