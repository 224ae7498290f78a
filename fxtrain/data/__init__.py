"""Data: index arithmetic and the sharded loader."""

from fxtrain.data._sharded import Sharded, shard

__all__ = ["Sharded", "shard"]
