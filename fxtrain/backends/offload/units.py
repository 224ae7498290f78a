"""Which tensors of a module belong to which unit of a placement, and where their values are."""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.backends.offload.mapped_files import MappedFile
from fxtrain.ops.whole_tensors import identity
from fxtrain.precision.quantizing import live_tensors
from fxtrain.state import Placement, Unit
from fxtrain.state.placement import DISK, unit_of


@attrs.define(kw_only=True, eq=False)
class PlacedTensor:
    """A parameter or buffer, once for all its names.

    Where its values are changes as they are filled in.

    Attributes:
        names: Its names, in the order of the module.
        tensors: The objects with these values: one, unless two parameters share memory.
        units: Names of the units that use it.
        held: Where it is held: a device, "cpu" or "disk".
        device: Where it is used.
        trained: It is a parameter that requires a gradient, or a buffer.
        file: The file with its values, if it is on disk.
        start: Offset of the first byte there.
        source: The file from which it was filled.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    units: tuple[str, ...]
    held: str
    device: torch.device
    trained: bool
    file: MappedFile | None = None
    start: int = 0
    source: Path | None = None

    @property
    def streamed(self) -> bool:
        """Whether it is held elsewhere than where it is used."""
        return self.held == DISK or torch.device(self.held) != self.device

    @property
    def fixed(self) -> bool:
        """Whether it is a parameter that stays as a file has it; a forward may change a buffer."""
        from_file = self.source is not None and not self.is_buffer
        return from_file and (self.streamed or not self.trained)

    @property
    def is_buffer(self) -> bool:
        """Whether a forward may change it: it is neither a parameter nor of a quantized weight."""
        return self.trained and not isinstance(self.tensors[0], nn.Parameter)


@attrs.define(kw_only=True, eq=False)
class StreamedUnit:
    """Tensors that are brought to their device together.

    Attributes:
        number: Its place among the units that stream.
        name: As in the placement.
        device: Where it computes.
        tensors: Its tensors.
        root: The module that is the unit, if it has a forward of its own.
        owners: The modules with one of its tensors.
        in_memory: It is in memory since it was used last, so that no thread reads it.
        homes: Where the values of its tensors are held.
        starts: Offset of each tensor in the bytes of the unit.
        nbytes: Of the unit.
        host: One buffer with all of it, if no part is on disk.
        users: How many of its modules run.
        flat: The bytes of all its tensors on the device, while it is there.
        copied: An event when they have arrived; None where copies are not asynchronous.
    """

    number: int
    name: str
    device: torch.device
    tensors: tuple[PlacedTensor, ...]
    root: nn.Module | None
    owners: tuple[nn.Module, ...]
    in_memory: bool = False
    homes: tuple[Tensor, ...] = ()
    starts: tuple[int, ...] = ()
    nbytes: int = 0
    host: Tensor | None = None
    users: int = 0
    flat: Tensor | None = None
    copied: Any = None

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the unit in its bytes."""
        views: list[Tensor] = []
        for start, home in zip(self.starts, self.homes, strict=True):
            part = flat[start : start + home.numel() * home.element_size()].view(home.dtype)
            views.append(part.as_strided(home.shape, home.stride()))
        return tuple(views)

    def gather(self, host: Tensor) -> None:
        """Copy the values to a buffer."""
        for view, home in zip(self.views(host), self.homes, strict=True):
            view.copy_(home)


def placed_tensors(module: nn.Module, placement: Placement) -> tuple[PlacedTensor, ...]:
    """Every parameter and buffer of a module, with its place.

    Raises:
        PlanError: the placement does not cover a tensor.
    """
    units = {unit.name: unit for unit in placement.units}
    groups: dict[Hashable, list[tuple[str, Tensor, Unit]]] = {}
    packed: set[Hashable] = set()
    for name, part, tensor in _tensors(module):
        key = identity(tensor)
        groups.setdefault(key, []).append((name, tensor, unit_of(units, name)))
        if not isinstance(tensor, nn.Parameter) and name.rpartition(".")[2] not in part._buffers:
            packed.add(key)
    return tuple(_placed(group, placement, packed=key in packed) for key, group in groups.items())


def streamed_units(
    module: nn.Module, tensors: tuple[PlacedTensor, ...], placement: Placement
) -> tuple[StreamedUnit, ...]:
    """The units to stream, in the order of the placement."""
    homes: dict[str, list[PlacedTensor]] = {}
    for tensor in tensors:
        for unit in tensor.units if tensor.streamed else ():
            homes.setdefault(unit, []).append(tensor)
    owners: dict[str, dict[int, nn.Module]] = {}
    units = {unit.name: unit for unit in placement.units}
    for name, part, _ in _tensors(module):
        owners.setdefault(unit_of(units, name).name, {})[id(part)] = part
    parts = dict(module.named_modules(remove_duplicate=False))
    return tuple(
        StreamedUnit(
            number=number,
            name=unit.name,
            device=torch.device(placement.computes_on(unit)),
            tensors=tuple(homes[unit.name]),
            root=_callable(parts.get(unit.name)),
            owners=tuple(owners[unit.name].values()),
        )
        for number, unit in enumerate(unit for unit in placement.units if unit.name in homes)
    )


def _placed(
    group: list[tuple[str, Tensor, Unit]], placement: Placement, *, packed: bool
) -> PlacedTensor:
    """Where a tensor is held.

    Args:
        packed: It belongs to a quantized weight. A number among those, which files hold as text,
            stays on the device.
    """
    _, tensor, unit = group[0]
    device = placement.computes_on(unit)
    parameter = packed or any(isinstance(value, nn.Parameter) for _, value, _ in group)
    streams = (parameter or placement.offload_buffers) and not (packed and tensor.ndim == 0)
    return PlacedTensor(
        names=tuple(name for name, _, _ in group),
        tensors=tuple({id(value): value for _, value, _ in group}.values()),
        units=tuple(dict.fromkeys(unit.name for _, _, unit in group)),
        held=unit.device if streams else device,
        device=torch.device(device),
        trained=not parameter or tensor.requires_grad,
    )


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """(name, its module, tensor) of every parameter and buffer, and of quantized weights."""
    for path, part in module.named_modules(remove_duplicate=False):
        own: dict[str, Tensor | None] = {**part._parameters, **part._buffers}
        if packed := live_tensors(part):
            own = {**packed, **{key: value for key, value in own.items() if key != "weight"}}
        for key, tensor in own.items():
            if tensor is not None:
                yield f"{path}.{key}" if path else key, part, tensor


def _callable(part: nn.Module | None) -> nn.Module | None:
    """The module, if calling it runs a forward: a ModuleList has none."""
    if part is None or type(part).forward is nn.Module.forward:
        return None
    return part
