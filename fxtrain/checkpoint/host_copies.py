"""Copy a state to host memory, large tensors while training continues.

A tensor that only an optimizer step changes need not be copied before `save` returns. It is
copied during the next forward and backward, and the next optimizer step waits for the copy.
torch's version counters detect other changes; samples of the values detect writes that the
counters miss.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain._host_memory import pinned_buffer
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.state import DistContext

__all__ = ["Staging", "stage"]

_LOG = logging.getLogger(__name__)
_LARGE = 1 << 20  # bytes of a tensor that is copied later
_MIN_DEFERRED_BYTES = 64 << 20  # total below which copying is too fast to be worth deferring
_SAMPLE_STRIDE = 1 << 14  # bytes from sample to sample


@attrs.frozen(kw_only=True, eq=False)
class _DeferredCopy:
    """A chunk that is copied after `save` has returned.

    Attributes:
        name: Name of the tensor.
        source: The live values.
        copy: The host tensor that receives them.
        versions: Tensors that share the values, each with its version counter at `save`.
        sample: Some of the values; None if the source is not contiguous.
    """

    name: str
    source: Tensor
    copy: Tensor
    versions: tuple[tuple[Tensor, int], ...]
    sample: Tensor | None

    @property
    def on_host(self) -> bool:
        """Whether the source is in host memory."""
        return self.source.device.type == "cpu"

    def same(self) -> bool:
        """Whether torch's version counters show no change of the source."""
        return all(tensor._version == version for tensor, version in self.versions)

    def fits(self) -> bool:
        """Whether the copy contains the sampled values."""
        if self.sample is None:
            return True
        found = _sample(self.copy)
        return found is not None and torch.equal(_raw(found), _raw(self.sample.cpu()))


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """Chunks in host memory, some of them still being copied.

    Attributes:
        chunks: The chunks to write, with host copies in place of the live tensors.
    """

    chunks: Sequence[TensorChunk]
    _deferred: list[_DeferredCopy] = attrs.field(alias="deferred")
    # Whether some sources are in host memory, copied by a thread; streams copy from accelerators.
    _on_host: bool = attrs.field(alias="on_host")
    _events: Sequence[Any] = attrs.field(alias="events")
    _hooks: list[Any] = attrs.field(factory=list, init=False)
    _made: threading.Event = attrs.field(factory=threading.Event, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _changed: list[str] = attrs.field(factory=list, init=False)
    _checked: threading.Event = attrs.field(factory=threading.Event, init=False)

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Make the deferred copies in the calling thread; the block may use them.

        Raises:
            CheckpointError: at the end, if a tensor changed before it was copied.
        """
        try:
            self._make()
            yield
        finally:
            self.settle()
            self._deferred.clear()  # the handle must not keep the model alive
        if self._changed:
            raise CheckpointError(
                f"{', '.join(self._changed[:5])} changed after save(background=True), before the "
                f"copy finished and outside an optimizer step. Call saving.copied() before "
                f"changing parameters directly."
            )

    def settle(self) -> None:
        """Wait until the state is copied, and check that it was not modified in the meantime."""
        if self._checked.is_set():
            return
        for event in self._events:
            torch.accelerator.current_stream(event.device).wait_event(event)
        if self._on_host:
            self._made.wait()
        with self._lock:
            if not self._checked.is_set():
                self._changed.extend(one.name for one in self._deferred if not one.same())
                self._checked.set()

    def hold(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Make the next step of these optimizers call `settle` first."""

        def wait(*_: Any) -> None:
            self.settle()

        if self._deferred:
            self._hooks.extend(one.register_step_pre_hook(wait) for one in optimizers)

    def release(self) -> None:
        """Remove the hooks; called in the training thread."""
        while self._hooks:
            self._hooks.pop().remove()

    def _make(self) -> None:
        try:
            for one in self._deferred:
                if one.on_host:
                    one.copy.copy_(one.source)
            for event in self._events:
                event.synchronize()
        finally:
            self._made.set()
        unfit = [one.name for one in self._deferred if not one.fits()]
        with self._lock:
            self._changed.extend(unfit)


def stage(
    ctx: DistContext, chunks: Sequence[TensorChunk], constant_between_steps: Mapping[str, Tensor]
) -> Staging:
    """Copy chunks into one host buffer, which later saves reuse.

    Args:
        constant_between_steps: By name, the tensors that only an optimizer step changes.
    """
    ordered = sorted(chunks, key=lambda chunk: -chunk.tensor.element_size())
    buffer = _buffer(ctx, sum(chunk.size for chunk in chunks))
    later = _deferrable(ordered, constant_between_steps, pinned=buffer.is_pinned())
    offset = 0
    staged: list[TensorChunk] = []
    deferred: list[_DeferredCopy] = []
    for chunk in ordered:
        copy = buffer[offset : offset + chunk.size].view(chunk.tensor.dtype)
        copy = copy.view(chunk.tensor.shape)
        if id(chunk) in later:
            deferred.append(_note(chunk, copy, constant_between_steps[chunk.name]))
        else:
            copy.copy_(chunk.tensor, non_blocking=True)
        staged.append(attrs.evolve(chunk, tensor=copy))
        offset += chunk.size
    if _accelerated(ctx):
        torch.accelerator.synchronize(ctx.device)
    on_host = any(one.on_host for one in deferred)
    return Staging(chunks=staged, deferred=deferred, on_host=on_host, events=_begin(deferred))


def _deferrable(
    chunks: Sequence[TensorChunk], constant_between_steps: Mapping[str, Tensor], *, pinned: bool
) -> set[int]:
    """Ids of the chunks to copy after `save` has returned; none below the minimum size."""
    found = [
        chunk
        for chunk in chunks
        if chunk.name in constant_between_steps
        and not chunk.own
        and chunk.size >= _LARGE
        and (pinned or chunk.tensor.device.type == "cpu")
        and not chunk.tensor.is_inference()
    ]
    return (
        {id(chunk) for chunk in found}
        if sum(p.size for p in found) >= _MIN_DEFERRED_BYTES
        else set()
    )


def _note(chunk: TensorChunk, copy: Tensor, live: Tensor) -> _DeferredCopy:
    # A DTensor and its local tensor have separate version counters.
    return _DeferredCopy(
        name=chunk.name,
        source=chunk.tensor,
        copy=copy,
        versions=tuple((one, one._version) for one in (live, chunk.tensor)),
        sample=_sample(chunk.tensor),
    )


def _begin(deferred: Sequence[_DeferredCopy]) -> list[Any]:
    """Start the copies on a separate stream of each accelerator; events mark their end."""
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
    """The bytes of a tensor, in which NaN equals itself."""
    return tensor.view(torch.uint8)


def _buffer(ctx: DistContext, size: int) -> Tensor:
    state = ctx.comm.state
    if state.save_buffer is None or state.save_buffer.numel() < size:
        state.save_buffer = None  # freed before the larger one is made
        state.save_buffer, refused = pinned_buffer(
            size, ctx.device.type if _accelerated(ctx) else "cpu"
        )
        if refused:
            _LOG.warning(
                "save(background=True): %d MiB of host memory could not be pinned (%s), so this "
                "rank copies its state before save returns. Raise the limit of locked memory "
                "(ulimit -l) to copy it while training continues.",
                size >> 20,
                refused,
            )
    return state.save_buffer


def _accelerated(ctx: DistContext) -> bool:
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == ctx.device.type
