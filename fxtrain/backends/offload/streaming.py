"""A model whose units stream: where their values are, and what brings them to their device."""

import contextlib
import functools
import logging
import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain import _tree
from fxtrain.backends.offload.mapped_files import (
    MappedFile,
    check_mapping,
    disk_waits,
    read,
)
from fxtrain.backends.offload.units import PlacedTensor, StreamedUnit
from fxtrain.errors import CheckpointError, PlanError
from fxtrain.ops.pinned_buffers import pinned_buffer
from fxtrain.state.placement import DISK

_LOG = logging.getLogger(__name__)
_THREADS = 4
# Bytes that a thread reads at once: few, so that what is read at the same time is close together,
# as the read-ahead of the system expects.
_PART = 1 << 20
_CACHES = ("past_key_values", "past_key_value", "cache_params")  # where layers put them
_outside_graphs: Any = torch.compiler.disable
_ALIGNMENT = 256  # bytes between the starts of tensors in a copy, as torch allocates them


@attrs.define(kw_only=True, eq=False)
class DeviceCopies:
    """Brings units to devices, and points their parameters there.

    Each copy is memory of its own, which torch's allocator uses again once nothing refers to it:
    neither a parameter nor autograd ever sees a copy that another unit overwrites.

    Attributes:
        units: All streamed units.
        prefetch: Units that are copied while one is in use.
        pin: Use pinned host memory; False once the system has refused it.
        loaded: Units that are on their devices.
        streams: On each device, the stream on which units are copied.
        left: On each device, an event after the last use of a unit that has left it.
        staging: Buffers through which units on disk pass, each with an event after its last use.
    """

    units: tuple[StreamedUnit, ...]
    prefetch: int
    pin: bool
    loaded: list[StreamedUnit] = attrs.field(factory=list, init=False)
    streams: dict[torch.device, Any] = attrs.field(factory=dict, init=False)
    left: dict[torch.device, Any] = attrs.field(factory=dict, init=False)
    staging: "queue.SimpleQueue[tuple[Tensor, Any]]" = attrs.field(
        factory=queue.SimpleQueue, init=False
    )

    def prepare(self) -> None:
        """Find out where values are held, and make the buffers through which disk units pass."""
        passing: list[int] = []
        for unit in self.units:
            unit.homes = tuple(_dense(placed.tensors[0].data) for placed in unit.tensors)
            unit.nbytes, starts = 0, list[int]()
            for home in unit.homes:
                starts.append(unit.nbytes)
                unit.nbytes += -(-home.numel() * home.element_size() // _ALIGNMENT) * _ALIGNMENT
            unit.starts = tuple(starts)
            if unit.device not in self.streams and unit.device.type == "cuda":
                self.streams[unit.device] = torch.cuda.Stream(unit.device)
            if any(placed.held == DISK for placed in unit.tensors):
                passing.append(unit.nbytes)
            else:  # one buffer, so that one copy brings all
                if unit.host is None:
                    unit.host = self.host_buffer(unit.nbytes)
                unit.gather(unit.host)
                unit.homes = unit.views(unit.host)
                _point(unit, unit.homes)
        for _ in range(self.prefetch + 1 if passing and self.staging.empty() else 0):
            self.staging.put((self.host_buffer(max(passing)), None))

    def fetch(self, unit: StreamedUnit) -> tuple[Tensor, Any]:
        """Copy a unit to its device; called in a thread.

        Returns:
            Its bytes there, and an event when they have arrived, as in `StreamedUnit`.
        """
        stream = self.streams.get(unit.device)
        host = unit.host
        buffer = None
        if host is None:
            buffer, free = self.staging.get()
            if free is not None:
                free.synchronize()
            host = buffer[: unit.nbytes]
            unit.gather(host)
        try:
            if left := self.left.get(unit.device):
                # Kernels that wait to run still use the memory of the unit before. Without this,
                # the host would run ahead of them, and each copy would take memory of its own.
                left.synchronize()
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                flat = torch.empty(unit.nbytes, dtype=torch.uint8, device=unit.device)
                flat.copy_(host, non_blocking=stream is not None)
                copied = None if stream is None else stream.record_event()
        finally:
            if buffer is not None:
                self.staging.put((buffer, None if stream is None else stream.record_event()))
        return flat, copied

    def leave(self) -> None:
        """Point the parameters of units that are not in use back to where they are held.

        Call it before the next copies begin, so that there are `prefetch` + 1 copies at most.
        """
        for unit in [unit for unit in self.loaded if not unit.users]:
            copied = unit.copied
            self._release(unit)
            if copied is not None:
                self.left[unit.device] = torch.cuda.current_stream(unit.device).record_event()

    def install(self, unit: StreamedUnit, flat: Tensor, copied: Any) -> None:
        """Point the parameters of a unit to its copy, as `fetch` returned it."""
        if copied is not None:
            stream = torch.cuda.current_stream(flat.device)
            stream.wait_event(copied)
            flat.record_stream(stream)
        unit.flat, unit.copied = flat, copied
        self.loaded.append(unit)
        _point(unit, unit.views(flat))
        for here, home in _buffers_of(unit):  # a thread may have copied it before it was changed
            here.copy_(home)

    def end(self, unit: StreamedUnit) -> None:
        """A module of the unit ends; without others, it may leave when another unit comes.

        What training changes in a forward, such as running statistics, is written to where it is
        held: torch counts no version of what batch normalization updates.
        """
        unit.users -= 1
        if unit.flat is not None and not unit.users and any(p.training for p in unit.owners):
            for here, home in _buffers_of(unit):
                home.copy_(here)

    def find(self, tensor: Tensor) -> tuple[StreamedUnit, int] | None:
        """The unit in whose copy a tensor is, and the offset of its storage's first byte there."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.untyped_storage().data_ptr()
        for unit in self.loaded:
            if unit.flat is not None and unit.flat.untyped_storage().data_ptr() == address:
                return unit, int(tensor.storage_offset()) * tensor.element_size()
        return None

    def take_back(self) -> None:
        """Point all parameters to where they are held."""
        for unit in list(self.loaded):
            self._release(unit)
        for stream in self.streams.values():
            stream.synchronize()  # copies that nobody waited for read the buffers

    def close(self) -> None:
        """Point all parameters to where they are held; give up the copies."""
        self.take_back()
        for unit in self.units:
            unit.host = None

    def host_buffer(self, nbytes: int) -> Tensor:
        """A buffer that an accelerator reads, pinned if the system allows it."""
        buffer, refused = pinned_buffer(nbytes, "cuda" if self.pin and self.streams else "cpu")
        if refused:
            self.pin = False
            _LOG.warning(
                "Offload(pin=True): %d MiB of host memory could not be pinned (%s), so units that "
                "follow are in pageable memory, from which copies are slower. Raise the limit of "
                "locked memory (ulimit -l), or pass pin=False.",
                nbytes >> 20,
                refused,
            )
        return buffer

    def _release(self, unit: StreamedUnit) -> None:
        self.loaded.remove(unit)
        unit.flat = unit.copied = None
        _point(unit, unit.homes)
        shared = {name for placed in unit.tensors for name in placed.units}
        for other in self.loaded if len(shared) > 1 else ():
            if other.name in shared and other.flat is not None:
                _point(other, other.views(other.flat))


@attrs.define(kw_only=True, eq=False)
class Streaming:
    """The state of a streamed model beside its module.

    Threads prepare units in the order in which they were used before. The next unit is predicted
    from the last two in use, which distinguishes forward from backward, and the first use of a unit
    from its second. A wrong prediction only costs time.

    Attributes:
        tensors: Every parameter and buffer, by its first name.
        units: Units that stream, in the order of the model.
        folder: Where tensors on disk are written that no file contains as they are needed.
        prefetch: Units to prepare while one is in use.
        copies: Copies of units on a device; None if they compute on the CPU.
        empty: First names of tensors without values.
        pool: The threads; the first begins with the first unit in use.
        following: The number of the unit that followed two others the last time.
        pending: By number of a unit, what prepares it.
        last: The numbers of the two units that were used last, in order.
        digests: Of files, by path, once a checkpoint was saved.
        files: Mapped files by path.
        waits: The value of `disk_waits` when units were last known to be in memory.
        checked: All values are there, and are where the next forward takes them from.
    """

    tensors: dict[str, PlacedTensor]
    units: tuple[StreamedUnit, ...]
    folder: Path | None
    prefetch: int
    copies: DeviceCopies | None
    empty: set[str]
    pool: ThreadPoolExecutor = attrs.field(
        init=False, factory=lambda: ThreadPoolExecutor(_THREADS, "fxtrain-offload")
    )
    following: dict[tuple[int, int], int] = attrs.field(factory=dict, init=False)
    pending: dict[int, list[Future[Any]]] = attrs.field(factory=dict, init=False)
    last: tuple[int, int] = attrs.field(default=(-1, -1), init=False)
    digests: dict[Path, str] = attrs.field(factory=dict, init=False)
    files: dict[Path, MappedFile] = attrs.field(factory=dict, init=False)
    waits: int | None = attrs.field(default=None, init=False)
    checked: bool = attrs.field(default=False, init=False)

    def use(self, unit: StreamedUnit) -> None:
        """Bring a unit to its device, and begin with those that come next.

        Raises:
            CheckpointError: a file cannot be read, or was changed.
        """
        for placed in {placed.file: placed for placed in unit.tensors}.values():
            if placed.file is not None:
                check_mapping(placed.file, placed.names[0], placed.start)
        copies = self.copies
        if copies is not None:
            if unit.flat is None:
                copies.leave()
                ((flat, copied),) = self._prepared(unit.number)
                copies.install(unit, flat, copied)
            return
        if (waits := disk_waits()) != self.waits:
            for other in self.units:
                other.in_memory = False  # the system has taken pages back
            self.waits = waits
        self._prepared(unit.number)
        unit.in_memory = waits is not None

    def ready(self) -> None:
        """Check before a forward, once after each change, that every tensor has values.

        Raises:
            CheckpointError: tensors have no values.
        """
        if names := sorted(self.empty):
            more = f" and {len(names) - 5} more" if names[5:] else ""
            raise CheckpointError(
                f"The model was called, but {', '.join(names[:5])}{more} have no values. Fill "
                f"them with fx.load_model(folder, model)."
            )
        if self.copies is not None:
            self.copies.prepare()
        self.checked = True

    def settle(self) -> None:
        """Leave values where they are held before they change: nothing has a copy of them."""
        if not self.checked:
            return
        wait(future for futures in self.pending.values() for future in futures)
        self.pending.clear()
        if self.copies is not None:
            self.copies.take_back()
        for unit in self.units:
            unit.in_memory = False
        self.checked = False

    def close(self) -> None:
        """End the threads, and leave values where they are held."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.pending.clear()
        if self.copies is not None:
            self.copies.close()

    def _prepared(self, number: int) -> list[Any]:
        """Wait until a unit is prepared, and begin with those that come next."""
        self.following[self.last] = number
        self.last = (self.last[1], number)
        running = self.pending.pop(number, None) or self._begin(number)
        coming = list(dict.fromkeys(self._predict()))
        for stale in self.pending.keys() - coming:
            for future in self.pending.pop(stale):
                future.cancel()
        for other in coming:
            if other not in self.pending:
                self.pending[other] = self._begin(other)
        try:
            return [future.result() for future in running]
        except Exception:
            self.pending.clear()  # what failed in advance is tried again when it is needed
            raise

    def _predict(self) -> Iterator[int]:
        before, now = self.last
        for _ in range(min(self.prefetch, len(self.units) - 1)):
            step = 1 if now >= before else -1
            before, now = now, self.following.get((before, now), (now + step) % len(self.units))
            if now != self.last[1]:
                yield now

    def _begin(self, number: int) -> list[Future[Any]]:
        """Let threads read a unit, or copy it to its device."""
        unit = self.units[number]
        parts: list[tuple[MappedFile, str, int, int]] = []
        for placed in sorted(unit.tensors, key=lambda placed: placed.start):
            if placed.file is not None and not unit.in_memory:
                stop = placed.start + placed.tensors[0].nbytes
                parts += [
                    (placed.file, placed.names[0], low, min(low + _PART, stop))
                    for low in range(placed.start, stop, _PART)
                ]
        if self.copies is not None:
            return [self.pool.submit(_read_and_copy, parts, self.copies, unit)]
        return [self.pool.submit(read, *part) for part in parts]


def _buffers_of(unit: StreamedUnit) -> list[tuple[Tensor, Tensor]]:
    """The buffers of a unit that is on its device, and where each is held."""
    pairs = zip(unit.tensors, unit.homes, strict=True)
    return [(tensor.tensors[0].data, home) for tensor, home in pairs if tensor.is_buffer]


def _point(unit: StreamedUnit, values: Sequence[Tensor]) -> None:
    for placed, value in zip(unit.tensors, values, strict=True):
        for tensor in placed.tensors:
            tensor.data = value


def _dense(tensor: Tensor) -> Tensor:
    """The tensor without gaps in its memory, in its own order of dims where it has none."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if tensor.numel() in (0, last + 1) else tensor.contiguous()


def _read_and_copy(parts: Iterable[Any], copies: DeviceCopies, unit: StreamedUnit) -> Any:
    for part in parts:
        read(*part)
    return copies.fetch(unit)


def attach(module: nn.Module, streaming: Streaming, *, backward: bool) -> None:
    """Register hooks on a module, which `fx.wrap` removes as all that it changes.

    Args:
        backward: Whether units are also needed in backward.
    """

    @_outside_graphs
    def check_values(_: nn.Module, __: Any) -> None:
        if not streaming.checked:
            streaming.ready()
        if not streaming.units:
            check.remove()  # once is enough

    check = module.register_forward_pre_hook(check_values)
    if any(tensor.device.type != "cpu" for tensor in streaming.tensors.values()):
        _move_values(module, streaming)
    for unit in streaming.units:
        if streaming.copies is not None:
            _use_copies(streaming, streaming.copies, unit)
        else:
            _use_in_place(streaming, unit, backward=backward)
    streamed = [owner for unit in streaming.units for owner in unit.owners]
    for part in dict.fromkeys([module, *streamed] if streamed else ()):
        vars(part).update(_apply=_refuse_move, __reduce_ex__=_refuse_copy)
    if streamed:
        _guard_state(module, streaming)


def _guard_state(module: nn.Module, streaming: Streaming) -> None:
    """Let `load_state_dict` change what is trained, and buffers, but no values that files have."""
    names = {name: placed for placed in streaming.tensors.values() for name in placed.names}

    def guard(path: str, _: nn.Module, state: Any, prefix: str, *__: Any) -> None:
        coming = {key.removeprefix(prefix): key for key in state if key.startswith(prefix)}
        known = {key: names[path + name] for name, key in coming.items() if path + name in names}
        if refused := sorted(key for key, placed in known.items() if placed.fixed):
            more = f" and {len(refused) - 3} more" if refused[3:] else ""
            raise PlanError(
                f"load_state_dict: {', '.join(refused[:3])}{more}: a streamed model has these "
                f"parameters in files, and checkpoints leave them out. Use "
                f"fx.load_model(state_dict, model), or load the others alone, with strict=False."
            )
        streaming.settle()

    for path, part in module.named_modules():
        start = f"{path}." if path else ""
        part.register_load_state_dict_pre_hook(functools.partial(guard, start))


def _use_in_place(streaming: Streaming, unit: StreamedUnit, *, backward: bool) -> None:
    """Read a unit before its module, and again before its backward."""

    @_outside_graphs
    def enter(_: nn.Module, __: Any) -> None:
        streaming.use(unit)

    @_outside_graphs
    def leave(_: nn.Module, __: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in _tensors(outputs):
                if leaf.requires_grad:
                    # Its gradient is known ahead of the backward of the unit.
                    leaf.register_hook(lambda _: streaming.use(unit))
                    return

    for part in unit.owners if unit.root is None else (unit.root,):
        part.register_forward_pre_hook(enter)
        if backward:
            part.register_forward_hook(leave)


def _use_copies(streaming: Streaming, copies: DeviceCopies, unit: StreamedUnit) -> None:
    """Load a unit before its module and before any module with one of its tensors.

    The second is for a forward that calls only a part of the unit, as recomputation does.
    """
    running: list[Any] = []  # for each module of the unit that runs, what autograd saves through

    @_outside_graphs
    def enter(_: nn.Module, __: Any) -> None:
        unit.users += 1  # it stays on its device until `leave`
        within = any(running)
        running.append(None)
        streaming.use(unit)
        if torch.is_grad_enabled() and not within:
            saved = _saved_by_place(streaming, copies)
            saved.__enter__()
            running[-1] = saved

    @_outside_graphs
    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        if not running:  # a hook before this one raised
            return
        saved = running.pop()
        if saved is not None:
            saved.__exit__(None, None, None)
        copies.end(unit)

    parts = unit.owners if unit.root is None else (unit.root, *unit.owners)
    for part in dict.fromkeys(parts):
        part.register_forward_pre_hook(enter)
        part.register_forward_hook(leave, always_call=True)


def _saved_by_place(streaming: Streaming, copies: DeviceCopies) -> Any:
    """Let autograd keep, of a tensor that is in a copy of a unit, only where it is there."""

    def pack(tensor: Tensor) -> Any:
        place = copies.find(tensor)
        if place is None:
            return tensor
        return (*place, tensor.dtype, tensor.shape, tensor.stride())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit, start, dtype, shape, stride = packed
        streaming.use(unit)
        return unit.flat.view(dtype).as_strided(shape, stride, start // dtype.itemsize)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _move_values(module: nn.Module, streaming: Streaming) -> None:
    """Move inputs to where they are used, and the model's outputs to where its inputs were."""
    first = next(iter(streaming.tensors.values())).device
    before: list[torch.device | None] = []

    def enter(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        before.append(next((leaf.device for leaf in _tensors((args, kwargs))), None))
        return _moved(args, first), _moved(kwargs, first)

    def leave(_: nn.Module, __: Any, outputs: Any) -> Any:
        device = before.pop() if before else None
        return outputs if device is None or outputs is None else _moved(outputs, device)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)
    if len({tensor.device for tensor in streaming.tensors.values()}) == 1:
        return

    def move_inputs(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return _moved(args, device), _moved(kwargs, device)

    devices = {
        name: tensor.device for tensor in streaming.tensors.values() for name in tensor.names
    }
    for path, part in module.named_modules():
        names = [f"{path}.{key}" for key in (*part._parameters, *part._buffers)]
        placed = [devices[name] for name in names if name in devices]
        if placed and part is not module:
            move = functools.partial(move_inputs, placed[-1])
            part.register_forward_pre_hook(move, with_kwargs=True)


def _moved(tree: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device; caches stay where layers have put them."""
    if isinstance(tree, dict) and any(name in tree for name in _CACHES):
        caches = {name: tree[name] for name in _CACHES if name in tree}
        rest = {name: value for name, value in tree.items() if name not in caches}
        return {**_moved(rest, device), **caches}
    if all(leaf.device == device for leaf in _tensors(tree)):
        return tree
    return _tree.map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _tree.flatten(tree)[0] if isinstance(leaf, Tensor)]


def _refuse_copy(*_: Any) -> Any:
    raise PlanError(
        "A streamed model cannot be copied or pickled as it is: its copy would stream the weights "
        "of this one. Use with fx.gathered(model) as net: copy.deepcopy(net)."
    )


def _refuse_move(*_: Any, **__: Any) -> Any:
    raise PlanError(
        "A streamed model cannot be moved or converted (.to, .cuda, .half, ...): its placement "
        "says where every tensor is. Wrap the model with another placement, or take it out with "
        "fx.unwrap(model)."
    )
