"""Causal attention of packed rows, within their documents."""

import functools
import importlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def document_bounds(positions: Tensor) -> Tensor:
    """Where the documents of a batch begin and end, over all of its rows: `cu_seqlens`.

    Args:
        positions: (rows, tokens), of `fx.tokens(..., documents=True)`: 0 where a document begins.
            Each token of padding counts as a document.

    Returns:
        (documents + 1), int32, on the device of the positions: the number of tokens before each
        document, and all of them.

    Effects:
        On a GPU, the host waits for the number of documents. Call it once for a batch, not in
        every layer.

    Example:
        >>> import torch, fxtrain as fx
        >>> fx.data.document_bounds(torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]))
        tensor([0, 3, 4, 6, 8], dtype=torch.int32)
    """
    starts = (positions.flatten() == 0).nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel()).int()


def document_attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """Causal attention of each token to those of its own document.

    Args:
        query: (rows, heads, tokens, channels), as for `F.scaled_dot_product_attention`.
        key: The same, with as many heads or a divisor of them.
        value: Likewise.
        bounds: Of `document_bounds`.

    Returns:
        (rows, heads, tokens, channels of the values).

    Effects:
        On CUDA in bf16 or fp16, from torch 2.11, one call of torch's `varlen_attn`. In 2.11 that
        has no grouped heads: keys and values are repeated for it. Elsewhere, one call of
        `F.scaled_dot_product_attention` for each document, and the host waits for their lengths.

    Source:
        torch.nn.attention.varlen.varlen_attn.

    Example:
        >>> import torch, fxtrain as fx
        >>> bounds = fx.data.document_bounds(torch.tensor([[0, 1, 0]]))
        >>> query, value = torch.zeros(1, 1, 3, 1), torch.tensor([1.0, 3.0, 8.0]).view(1, 1, 3, 1)
        >>> fx.data.document_attention(query, query, value, bounds).flatten()
        tensor([1., 2., 8.])
    """
    rows, _, tokens, _ = query.shape
    grouped = key.shape[1] != query.shape[1]
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1).to(dtype) for tensor in (query, key, value))
    options = _varlen_options()
    if kind == "cuda" and dtype in (torch.bfloat16, torch.float16) and "window_size" in options:
        from torch.nn.attention.varlen import varlen_attn

        settings: dict[str, Any] = {"window_size": (-1, 0)}
        if grouped and "enable_gqa" in options:
            settings["enable_gqa"] = True
        elif grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        # No document is longer than a row; the exact maximum would be one more wait of the host.
        out = varlen_attn(q, k, v, bounds, bounds, tokens, tokens, **settings)
        assert isinstance(out, Tensor)  # a tuple for return_aux only
    else:
        parts = [tensor.transpose(0, 1).split(bounds.diff().tolist(), 1) for tensor in (q, k, v)]
        outputs = [
            F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=grouped)
            for part in zip(*parts, strict=True)
        ]
        out = torch.cat(outputs, 1).transpose(0, 1)
    return out.unflatten(0, (rows, tokens)).transpose(1, 2)


@functools.cache
def _varlen_options() -> frozenset[str]:
    """The arguments of torch's `varlen_attn`, which differ by version; none before torch 2.10."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(module.varlen_attn).parameters)
