"""Objects sent between ranks as pickles, with the bytes of their tensors and arrays beside those.

They are sent between the ranks of one run only. An object that pickles on one rank may fail to
unpickle on another (a missing module, a `__setstate__` that raises), and only that rank notices.
So after reading objects that could fail, the ranks exchange their errors before any call returns.

Unpickling can run arbitrary code of the sender. If the run has a secret, everything is signed
with it, and pickles without a valid signature are refused.
"""

import ctypes
import hmac
import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxtrain._secret import SECRET, TAG_BYTES, sign
from fxtrain.errors import CollectiveError
from fxtrain.ops.transport.exchange import exchange_texts
from fxtrain.ops.transport.packing import as_tensor
from fxtrain.state import DistContext

_SAFE, _UNSURE, _FAILED = range(3)
_HEADER = struct.Struct("<QQ")  # one of these, and where the pickle begins, after the values
_BEGIN = TAG_BYTES + _HEADER.size
_OWN_PREFIX = "fxtrain."
# In addition to plain values: types that every rank can unpickle.
_SAFE_TYPES = frozenset({complex, torch.dtype, torch.device, torch.Size, OrderedDict})


class _Pickler(pickle.Pickler):
    """Leaves out the values of tensors; records whether unpickling may need code that is missing.

    Arrays are sent as tensors.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.end = _BEGIN
        self.unsure = False

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and _has_plain_values(obj):
            plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
            self.tensors.append(plain)
            start, self.end = self.end, self.end + plain.nbytes
            return _values, (start, plain.dtype, plain.shape, obj.is_cpu)
        kind = obj if isinstance(obj, type) else type(obj)
        if kind is not obj and getattr(obj, "shape", ()) and (array := as_tensor(obj)):
            tensor, back = array
            return back, (tensor,)
        home = str(getattr(obj, "__module__", None))  # of a class, a function or its class
        if kind not in _SAFE_TYPES and not home.startswith(_OWN_PREFIX):
            self.unsure = True
        return NotImplemented


def _has_plain_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


class _Unpickler(pickle.Unpickler):
    """Gives tensors their values: on the CPU, or on the device of a context as on the sender."""

    def __init__(self, content: memoryview, begin: int, address: int, ctx: DistContext) -> None:
        super().__init__(io.BytesIO(content[begin:]))
        self._address, self._ctx = address, ctx

    def find_class(self, module: str, name: str) -> Any:
        own = module == __name__ and name == _values.__name__
        return self._tensor if own else super().find_class(module, name)

    def _tensor(self, start: int, dtype: torch.dtype, shape: torch.Size, is_cpu: bool) -> Tensor:  # noqa: FBT001
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        ctypes.memmove(tensor.data_ptr(), self._address + start, tensor.nbytes)
        return tensor if is_cpu else tensor.to(self._ctx.device)


def _values(start: int, dtype: torch.dtype, shape: torch.Size, is_cpu: bool) -> NoReturn:  # noqa: FBT001
    """What pickles name in place of a tensor: where its bytes are; read by `_Unpickler` only."""
    raise AssertionError("only the name of this function is used")


def dump(value: Any, ctx: DistContext) -> Tensor:
    """Pickle a value for the other ranks of this run, as uint8 on the CPU.

    If a value does not pickle, its error is sent instead, so that every rank still joins;
    `unpickle_all` raises it on every rank.
    """
    try:
        return dump_or_raise(value, ctx)
    except Exception as error:  # pickle raises whatever __reduce__ does
        text = error_text(error).encode(errors="replace")
        return _as_blob([text], ctx, _FAILED, _BEGIN)


def dump_or_raise(value: Any, ctx: DistContext) -> Tensor:
    """As `dump`, where a value that does not pickle raises its error."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    parts = [_memory(tensor.data_ptr(), tensor.nbytes) for tensor in pickler.tensors]
    kind = _UNSURE if pickler.unsure else _SAFE
    return _as_blob([*parts, stream.getbuffer()], ctx, kind, pickler.end)


def _as_blob(parts: list[bytes | memoryview], ctx: DistContext, kind: int, begin: int) -> Tensor:
    data = bytearray().join([bytes(TAG_BYTES), _HEADER.pack(kind, begin), *parts])
    data[:TAG_BYTES] = sign(memoryview(data)[TAG_BYTES:], ctx.comm.key)
    return torch.frombuffer(data, dtype=torch.uint8)


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def unpickles_anywhere(blob: Tensor) -> bool:
    """Whether every rank can unpickle this: plain values, tensors, arrays, fxtrain's records."""
    return int(blob[TAG_BYTES]) == _SAFE


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
    checked = {rank: _verified(op, rank, blob, ctx) for rank, blob in blobs.items()}
    values: list[Any] = []
    problem = ""
    for rank, unpickler in checked.items():
        try:
            values.append(unpickler.load())
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


def _verified(op: str, rank: int, blob: Tensor, ctx: DistContext) -> _Unpickler:
    """What reads the output of `dump` on a rank."""
    content = _memory(blob.data_ptr(), blob.numel())
    kind, begin = _HEADER.unpack_from(content, TAG_BYTES)
    if kind == _FAILED:
        raise CollectiveError(
            f"{op}: rank {rank} passed a value that cannot be sent: "
            f"{str(content[begin:], errors='replace')}. Send tensors, or objects that pickle.",
            code="FX304",
        )
    wanted = sign(content[TAG_BYTES:], ctx.comm.key)
    if not hmac.compare_digest(wanted, content[:TAG_BYTES]):
        raise CollectiveError(
            f"{op}: the object from rank {rank} is not signed with this run's secret, so it was "
            f"not unpickled. Either {SECRET} differs between ranks, or another program sent the "
            f"object: check who can reach the ports of the ranks.",
            code="FX103",
        )
    return _Unpickler(content, begin, blob.data_ptr(), ctx)


def error_text(error: BaseException) -> str:
    """An error as text: its type, then its message."""
    return f"{type(error).__name__}: {error}"
