"""The sizes of a model's units: what a placement is computed from."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs
import torch

from fxtrain._errors import PlanError
from fxtrain.models.memory_estimates import BYTES
from fxtrain.models.weight_list import KvCache
from fxtrain.state import DtypeRule, dtype_of

__all__ = ["Sizes", "Tally", "UnitSize"]


class UnitSize(NamedTuple):
    """A module, or a tensor beside modules, that is placed as one.

    Attributes:
        name: Of the module or tensor.
        kind: Class of the module; empty if unknown, and of a tensor.
        whole: It is a module that must not be split.
        bytes: Of its tensors, tied ones in the first unit only.
        buffers: Of those, buffers.
        reads: Bytes of its parameters with all that are tied to others: what it computes with.
    """

    name: str
    kind: str = ""
    whole: bool = False
    bytes: int = 0
    buffers: int = 0
    reads: int = 0


@attrs.frozen(kw_only=True)
class Sizes:
    """The sizes of a model, without its values.

    Attributes:
        source: What was measured.
        units: In the order of the model; each tensor belongs to one of them.
        tensors: Bytes by every name of every parameter and buffer, in the order of the model; 0
            for a tensor that is tied to one before it.
        buffers: The names of buffers.
        tied: Groups of names of one tensor.
        dtypes: Rules by which the sizes were computed.
        cache: Shape of the key-value cache; None if unknown.
        itemsize: Bytes of an element of most parameters.
    """

    source: str
    units: tuple[UnitSize, ...]
    tensors: Mapping[str, int] = attrs.field(repr=False)
    buffers: frozenset[str] = attrs.field(default=frozenset(), repr=False)
    tied: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[DtypeRule, ...] = ()
    cache: KvCache | None = None
    itemsize: int = 4

    @property
    def bytes(self) -> int:
        """Of all tensors, each counted once."""
        return sum(unit.bytes for unit in self.units)


class Tally:
    """Counts the tensors of one unit after another.

    It keeps no object for a tensor but its name: a model may have 170,000, and Python's garbage
    collector looks at every object again and again.
    """

    def __init__(
        self, rules: tuple[DtypeRule, ...], special: Mapping[str, float | str] | None
    ) -> None:
        self.rules = rules
        self.widths = {rule.dtype: _itemsize(rule.dtype) for rule in rules}
        packed = special or {}
        self.packed = tuple(DtypeRule(match=match, dtype=match) for match in packed)
        self.per_element = {match: _per_element(match, size) for match, size in packed.items()}
        self.units: list[UnitSize] = []
        self.tensors: dict[str, int] = {}
        self.buffers: list[str] = []
        self.first: dict[Any, str] = {}
        self.tied: dict[str, list[str]] = {}
        self.elements: dict[int, int] = {}
        self.open("")

    def open(self, name: str, kind: str = "", *, whole: bool = False) -> None:
        """Begin a unit."""
        self.name, self.kind, self.whole = name, kind, whole
        self.bytes = self.in_buffers = self.reads = 0
        self.inside: set[Any] = set()

    def close(self) -> None:
        """End the unit; one without tensors is none."""
        if self.inside:
            self.units.append(
                UnitSize(self.name, self.kind, self.whole, self.bytes, self.in_buffers, self.reads)
            )

    def add(
        self, name: str, key: Any, dtype: torch.dtype, numel: int, nbytes: int, *, buffer: bool
    ) -> None:
        """Count a tensor under one of its names; tensors with equal keys are one."""
        if buffer:
            size = nbytes
        else:
            size = self._held(name, dtype, numel, nbytes)
            if key not in self.inside:
                self.reads += size
        self.inside.add(key)
        before = self.first.setdefault(key, name)
        if before is not name:
            self.tied.setdefault(before, [before]).append(name)
            size = 0
        self.tensors[name] = size
        self.bytes += size
        if buffer:
            self.in_buffers += size
            self.buffers.append(name)

    def sizes(self, source: str, cache: KvCache | None) -> Sizes:
        """What was counted."""
        return Sizes(
            source=source,
            units=tuple(self.units),
            tensors=self.tensors,
            buffers=frozenset(self.buffers),
            tied=tuple(map(tuple, self.tied.values())),
            dtypes=self.rules,
            cache=cache,
            itemsize=max(self.elements, key=lambda width: self.elements[width], default=4),
        )

    def _held(self, name: str, dtype: torch.dtype, numel: int, nbytes: int) -> int:
        """Bytes of a parameter in the format that rules give it."""
        width = dtype.itemsize
        if (self.packed or self.rules) and dtype.is_floating_point:
            match = dtype_of(self.packed, name)
            if match is not None:
                return round(numel * self.per_element[match])
            word = dtype_of(self.rules, name)
            if word is not None:
                width = self.widths[word]
                nbytes = numel * width
        self.elements[width] = self.elements.get(width, 0) + numel
        return nbytes


def _itemsize(name: str) -> int:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PlanError(
            f"sizes: {name!r} is not a dtype. Choose one by torch's name, such as 'bfloat16'."
        )
    return found.itemsize


def _per_element(match: str, size: float | str) -> float:
    found = BYTES.get(size) if isinstance(size, str) else size
    if not isinstance(found, int | float) or found <= 0:
        raise PlanError(
            f"sizes(special={{{match!r}: {size!r}}}): choose a number of bytes per element, or "
            f"one of {', '.join(map(repr, BYTES))}."
        )
    return found
