"""Objects sent between ranks as pickles.

Pickles are sent between the ranks of one run only. An object that pickles on one rank may fail to
unpickle on another (a missing module, a `__setstate__` that raises), and only that rank notices.
So after reading objects that could fail, the ranks exchange their errors before any call returns.

Unpickling can run arbitrary code of the sender. If the run has a secret, each pickle is signed
with it, and pickles without a valid signature are refused.
"""

import ctypes
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2
from torch.storage import TypedStorage, _load_from_bytes

from fxtrain._secret import SECRET, sign, verified
from fxtrain.errors import CollectiveError
from fxtrain.ops.transport.exchange import exchange_texts
from fxtrain.state import DistContext

_SAFE, _UNSURE, _FAILED = range(3)
_OWN_PREFIX = "fxtrain."
# In addition to plain values: types that every rank's torch can unpickle, and those that pickles
# of tensors refer to.
_SAFE_TYPES = frozenset({complex, torch.dtype, torch.device, torch.Size, OrderedDict, TypedStorage})
_SAFE_REBUILDERS = frozenset({_rebuild_tensor_v2, _load_from_bytes})


class _Pickler(pickle.Pickler):
    """Records whether unpickling may need code that other ranks lack."""

    unsure = False

    def reducer_override(self, obj: Any) -> Any:
        kind = obj if isinstance(obj, type) else type(obj)
        home = str(getattr(obj, "__module__", None))  # of a class, a function or its class
        # Another rank may lack the device.
        plain = obj.is_cpu if kind is Tensor and obj is not Tensor else kind in _SAFE_TYPES
        rebuilds = isinstance(obj, FunctionType) and obj in _SAFE_REBUILDERS
        if not plain and not rebuilds and not home.startswith(_OWN_PREFIX):
            self.unsure = True
        return NotImplemented


def dump(value: Any, ctx: DistContext) -> Tensor:
    """Pickle a value for the other ranks of this run, as uint8 on the CPU.

    If a value does not pickle, its error is sent instead, so that every rank still joins;
    `unpickle_all` raises it on every rank.
    """
    try:
        return dump_or_raise(value, ctx)
    except Exception as error:  # pickle raises whatever __reduce__ does
        data = bytearray([_FAILED]) + error_text(error).encode(errors="replace")
        return torch.frombuffer(data, dtype=torch.uint8)


def dump_or_raise(value: Any, ctx: DistContext) -> Tensor:
    """As `dump`, where a value that does not pickle raises its error."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    kind = _UNSURE if pickler.unsure else _SAFE
    data = bytearray([kind]) + sign(stream.getbuffer(), ctx.comm.key)
    return torch.frombuffer(data, dtype=torch.uint8)


def unpickles_anywhere(blob: Tensor) -> bool:
    """Whether every rank can unpickle this: plain values, CPU tensors, fxtrain's records."""
    return int(blob[0]) == _SAFE


def unpickle_all(
    op: str, blobs: Mapping[int, Tensor], ctx: DistContext, *, sure: bool | None = None
) -> list[Any]:
    """Unpickle objects that the ranks received.

    Args:
        blobs: Outputs of `dump`, by sender.
        sure: Whether every rank can unpickle its own; None if all have received the same, which
            tells.

    Effects:
        One exchange of packets, unless every rank is sure to succeed.

    Raises:
        CollectiveError: a sender could not pickle its value, a signature is not of this run, or
            a rank cannot unpickle a value; on every rank.
    """
    pickles = {rank: _verified_pickle(op, rank, blob, ctx) for rank, blob in blobs.items()}
    values: list[Any] = []
    problem = ""
    for rank, data in pickles.items():
        try:
            values.append(pickle.loads(data))
        except Exception as error:  # raises whatever the object's own code does
            problem = f"the value of rank {rank}: {error_text(error)}"
            break
    if sure is None:
        sure = all([unpickles_anywhere(blob) for blob in blobs.values()])
    texts = [] if sure else exchange_texts(ctx, (op, "unpickled"), problem)
    lines = [f"rank {rank} cannot unpickle {text}" for rank, text in enumerate(texts) if text]
    if lines:
        raise CollectiveError(
            f"{op}: {'; '.join(lines)}. Send plain values or tensors, or make the same version "
            f"of the class importable on every rank.",
            code="FX304",
        )
    return values


def _verified_pickle(op: str, rank: int, blob: Tensor, ctx: DistContext) -> memoryview:
    """The pickle in the output of `dump` on a rank."""
    content = memoryview(ctypes.string_at(blob.data_ptr(), blob.numel()))
    if content[0] == _FAILED:
        raise CollectiveError(
            f"{op}: rank {rank} passed a value that cannot be sent: "
            f"{str(content[1:], errors='replace')}. Send tensors, or objects that pickle.",
            code="FX304",
        )
    data = verified(content[1:], ctx.comm.key)
    if data is None:
        raise CollectiveError(
            f"{op}: the object from rank {rank} is not signed with this run's secret, so it was "
            f"not unpickled. Either {SECRET} differs between ranks, or another program sent the "
            f"object: check who can reach the ports of the ranks.",
            code="FX103",
        )
    return data


def error_text(error: BaseException) -> str:
    """An error as text: its type, then its message."""
    return f"{type(error).__name__}: {error}"
