"""Data: index arithmetic and the sharded loader."""

from fxtrain.data.attention_within_documents import document_attention, document_bounds
from fxtrain.data.sharded_loader import Sharded
from fxtrain.data.sharding import every_row, shard
from fxtrain.data.tensor_batches import batch
from fxtrain.data.token_rows import tokens
from fxtrain.data.tokenizing import tokenize
from fxtrain.state.token_files import (
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
__dir__ = __all__.copy  # for completion
