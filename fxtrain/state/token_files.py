"""Files of tokens, as other libraries write them. Data only."""

from typing import Literal

import attrs

from fxtrain._record import at_least, record


@record
class MegatronTokens:
    """Tokens in Megatron's indexed files, `PATH.bin` and `PATH.idx`.

    Attributes:
        path: The path that both files share, without `.bin` and `.idx`.

    Example:
        >>> import fxtrain as fx
        >>> fx.data.MegatronTokens(path="wiki_text_document").path
        'wiki_text_document'
    """

    path: str


@record
class NanoGPTTokens:
    """Tokens in a file without a header, as nanoGPT writes them, in little-endian order.

    Attributes:
        path: The file.
        dtype: Type of a token in the file.
        end: The token that ends a document and belongs to it; with None, the file is one document.

    Example:
        >>> import fxtrain as fx
        >>> fx.data.NanoGPTTokens(path="train.bin", end=50256).dtype
        'uint16'
    """

    path: str
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    end: int | None = attrs.field(default=None, validator=at_least(0))
