"""Copies of a state in host memory, the large ones made while training goes on.

What nothing but an optimizer's step changes need not be copied before `save` returns: it is
copied while the next forward and backward run, and the next step of an optimizer waits for it.
That nobody else changed it is seen by torch's version counters, and, for writes that these do
not count, by samples of the values.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.state import DistContext

__all__ = ["Staging", "stage"]

_LARGE = 1 << 20  # bytes of a tensor that is copied later
_MIN_DEFERRED_BYTES = 64 << 20  # bytes of all of them, below which nobody notices the copy
_SAMPLE_STRIDE = 1 << 14  # bytes from sample to sample


@attrs.frozen(kw_only=True, eq=False)
class _DeferredCopy:
    """A piece that is copied after `save` has returned.

    Attributes:
        name: Of the tensor.
        source: The live values.
        copy: Where they go.
        versions: Tensors that share the values, and how often each had been changed.
        sample: Some of the values; None where they do not lie in order.
    """

    name: str
    source: Tensor
    copy: Tensor
    versions: tuple[tuple[Tensor, int], ...]
    sample: Tensor | None

    @property
    def on_host(self) -> bool:
        """Whether the source lies in host memory."""
        return self.source.device.type == "cpu"

    def same(self) -> bool:
        """Whether nobody has changed the source in a way that torch counts."""
        return all(tensor._version == version for tensor, version in self.versions)

    def fits(self) -> bool:
        """Whether the copy holds the values that were sampled."""
        if self.sample is None:
            return True
        found = _sample(self.copy)
        return found is not None and torch.equal(_raw(found), _raw(self.sample.cpu()))


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """Pieces in host memory, or on their way there.

    Attributes:
        pieces: The same as the live ones, of copies.
    """

    pieces: Sequence[TensorChunk]
    _late: list[_DeferredCopy] = attrs.field(alias="late")
    # Some of them lie in host memory, where a thread copies; the others an accelerator's streams.
    _on_host: bool = attrs.field(alias="on_host")
    _events: Sequence[Any] = attrs.field(alias="events")
    _hooks: list[Any] = attrs.field(factory=list, init=False)
    _made: threading.Event = attrs.field(factory=threading.Event, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _changed: list[str] = attrs.field(factory=list, init=False)
    _judged: threading.Event = attrs.field(factory=threading.Event, init=False)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Copy what is late, in the thread that calls this; the block may use the copies.

        Raises:
            CheckpointError: at the end, if a tensor was changed before it was copied.
        """
        try:
            self._make()
            yield
        finally:
            self.settle()
            self._late.clear()  # the model may be gone before the handle is
        if self._changed:
            raise CheckpointError(
                f"{', '.join(self._changed[:5])} changed between save(background=True) and the "
                f"optimizer's next step, before it was known to be copied. Call "
                f"saving.copied() before you change parameters by hand."
            )

    def settle(self) -> None:
        """Let the state be changed from now on: wait until it is copied, and judge whether it was
        left alone till then.
        """
        if self._judged.is_set():
            return
        for event in self._events:
            torch.accelerator.current_stream(event.device).wait_event(event)
        if self._on_host:
            self._made.wait()
        with self._lock:
            if not self._judged.is_set():
                self._changed.extend(one.name for one in self._late if not one.same())
                self._judged.set()

    def hold(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Have the next step of these optimizers settle first."""

        def wait(*_: Any) -> None:
            self.settle()

        if self._late:
            self._hooks.extend(one.register_step_pre_hook(wait) for one in optimizers)

    def release(self) -> None:
        """Take the hooks back, in the thread that trains."""
        while self._hooks:
            self._hooks.pop().remove()

    def _make(self) -> None:
        try:
            for one in self._late:
                if one.on_host:
                    one.copy.copy_(one.source)
            for event in self._events:
                event.synchronize()
        finally:
            self._made.set()
        unfit = [one.name for one in self._late if not one.fits()]
        with self._lock:
            self._changed.extend(unfit)


def stage(
    ctx: DistContext, chunks: Sequence[TensorChunk], constant_between_steps: Mapping[str, Tensor]
) -> Staging:
    """Copy pieces into one host buffer, which the next save uses again.

    Args:
        constant_between_steps: By name, the tensors that nothing but an optimizer's step changes.
    """
    ordered = sorted(chunks, key=lambda piece: -piece.tensor.element_size())
    buffer = _buffer(ctx, sum(piece.size for piece in chunks))
    later = _deferrable(ordered, constant_between_steps, pinned=buffer.is_pinned())
    place = 0
    staged: list[TensorChunk] = []
    deferred: list[_DeferredCopy] = []
    for piece in ordered:
        there = buffer[place : place + piece.size].view(piece.tensor.dtype)
        there = there.view(piece.tensor.shape)
        if id(piece) in later:
            deferred.append(_note(piece, there, constant_between_steps[piece.name]))
        else:
            there.copy_(piece.tensor, non_blocking=True)
        staged.append(attrs.evolve(piece, tensor=there))
        place += piece.size
    if _accelerated(ctx):
        torch.accelerator.synchronize(ctx.device)
    on_host = any(one.on_host for one in deferred)
    return Staging(pieces=staged, late=deferred, on_host=on_host, events=_begin(deferred))


def _deferrable(
    chunks: Sequence[TensorChunk], constant_between_steps: Mapping[str, Tensor], *, pinned: bool
) -> set[int]:
    """Which pieces are copied after `save` has returned, if there is enough of them."""
    found = [
        piece
        for piece in chunks
        if piece.name in constant_between_steps
        and not piece.own
        and piece.size >= _LARGE
        and (pinned or piece.tensor.device.type == "cpu")
        and not piece.tensor.is_inference()
    ]
    return (
        {id(piece) for piece in found}
        if sum(p.size for p in found) >= _MIN_DEFERRED_BYTES
        else set()
    )


def _note(piece: TensorChunk, there: Tensor, live: Tensor) -> _DeferredCopy:
    # Changes of a DTensor are counted outside, those of its local part inside.
    return _DeferredCopy(
        name=piece.name,
        source=piece.tensor,
        copy=there,
        versions=tuple((one, one._version) for one in (live, piece.tensor)),
        sample=_sample(piece.tensor),
    )


def _begin(deferred: Sequence[_DeferredCopy]) -> list[Any]:
    """Have accelerators copy on a stream of their own; what it has done when all is copied."""
    devices = {one.source.device for one in deferred if not one.on_host}
    events: list[Any] = []
    for device in devices:
        stream = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for one in deferred:
                if one.source.device == device:
                    one.copy.copy_(one.source, non_blocking=True)
        events.append(stream.record_event())
    return events


def _sample(tensor: Tensor) -> Tensor | None:
    if not tensor.is_contiguous():
        return None
    some = tensor.view(-1)[:: max(1, _SAMPLE_STRIDE // tensor.element_size())]
    return some.clone(memory_format=torch.contiguous_format)


def _raw(tensor: Tensor) -> Tensor:
    """Bits, of which NaN equals itself."""
    return tensor.view(torch.uint8)


def _buffer(ctx: DistContext, size: int) -> Tensor:
    state = ctx.comm.state
    if state.save_buffer is None or state.save_buffer.numel() < size:
        state.save_buffer = None  # freed before the larger one is made
        pinned = _accelerated(ctx) and ctx.device.type != "mps"
        state.save_buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return state.save_buffer


def _accelerated(ctx: DistContext) -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == ctx.device.type
