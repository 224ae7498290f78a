"""Files of tokens: reading, packing, blending and writing them. Their names are in `fx.data`."""

from fxtrain.token_files.attention_within_documents import document_attention, document_bounds
from fxtrain.token_files.records import (
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
from fxtrain.token_files.rows import tokens
from fxtrain.token_files.tokenizing import tokenize

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
    "document_attention",
    "document_bounds",
    "tokenize",
    "tokens",
]
__dir__ = __all__.copy  # for completion
