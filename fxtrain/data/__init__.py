"""Data: index arithmetic and the sharded loader."""

from typing import TYPE_CHECKING

from fxtrain import _extensions
from fxtrain.data.sharded_loader import Sharded
from fxtrain.data.sharding import every_row, shard

if TYPE_CHECKING:
    from fxtrain._extensions import (
        BestFit,
        Blend,
        BlendPart,
        ColumnTokens,
        DatatroveTokens,
        MDSTokens,
        MegatronOrder,
        MegatronTokens,
        NanoGPTTokens,
        NumPyTokens,
        batch,
        document_attention,
        document_bounds,
        tokenize,
        tokens,
    )

__all__ = [
    "BestFit",
    "Blend",
    "BlendPart",
    "ColumnTokens",
    "DatatroveTokens",
    "MDSTokens",
    "MegatronOrder",
    "MegatronTokens",
    "NanoGPTTokens",
    "NumPyTokens",
    "Sharded",
    "batch",
    "document_attention",
    "document_bounds",
    "every_row",
    "shard",
    "tokenize",
    "tokens",
]
__getattr__ = _extensions.offers(__name__, __all__)
__dir__ = __all__.copy  # for completion
