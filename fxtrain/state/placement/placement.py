"""Where every tensor of a model is held: a value that a file can contain."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import attrs

from fxtrain._errors import PlanError
from fxtrain._record import at_least, closest, record

__all__ = [
    "DISK", "DtypeRule", "PlacedUnit", "Placement", "Room", "dtype_of", "owner_of", "tier_of",
    "units_by_name",
]  # fmt: skip

DISK = "disk"


@record
class PlacedUnit:
    """A part of a model that is held, and read, as one.

    Attributes:
        name: A module, such as `model.layers.7`, or a single parameter or buffer. Of the units
            whose names a tensor is under, it belongs to the one with the longest name; "" is the
            model itself.
        device: Where it is held: a device such as "cuda:0", "cpu", or "disk".
        bytes: Of its tensors, as they are held. A tied tensor counts in the first unit that has it.
        buffers: Of those, buffers that stay on `Placement.device` where the unit does not.
        working: Room for it on the device where it computes, beside its tensors: the key-value
            cache of its layers.
    """

    name: str
    device: str
    bytes: int = attrs.field(default=0, validator=at_least(0))
    buffers: int = attrs.field(default=0, validator=at_least(0))
    working: int = attrs.field(default=0, validator=at_least(0))


@record
class DtypeRule:
    """The dtype of the floating-point parameters whose names match.

    Attributes:
        match: A pattern such as `*norm*` or `model.layers.0.*`.
        dtype: As torch calls it: float32, bfloat16, float16, float8_e4m3fn, ...
    """

    match: str
    dtype: str


@record
class Room:
    """Memory of a device that a placement keeps free for something else than weights.

    Attributes:
        device: The device, or "cpu".
        bytes: Room for activations and for all else that is not the model's.
    """

    device: str
    bytes: int = attrs.field(validator=at_least(0))


@record
class Placement:
    """Where each unit of a model is held. A value: compare, hash, store, diff it.

    A unit on a device computes there. Units on the CPU or on disk stream to `device` when they
    are needed; if `device` is the CPU, units on the CPU compute where they are.

    Attributes:
        units: In the order in which the model defines them.
        device: Where units compute that are held on none.
        tied: Names of tensors that are one tensor, each group in the order of the model; the
            units of a group are held in one place.
        offload_buffers: Buffers stream with the parameters of their unit. Otherwise they stay on
            the device where the unit computes.
        ahead: Units that `room` allows to read ahead.
        room: Bytes of `device` for streamed units: one in use and `ahead` more.
        staging: Bytes of the CPU through which units on disk pass on their way to an accelerator.
        reserved: What else is kept free, by device.
        dtypes: The dtype in which parameters are held, by name; the first match counts, and
            others keep theirs.

    Example:
        >>> import fxtrain as fx
        >>> unit = fx.state.PlacedUnit(name="layers.0", device="disk", bytes=400)
        >>> placement = fx.Placement(units=(unit,), device="cpu", room=800)
        >>> placement.streamed == (unit,), placement.bytes_on("cpu")
        (True, 800)
        >>> fx.loads(fx.dumps(placement), fx.Placement) == placement
        True
    """

    units: tuple[PlacedUnit, ...]
    device: str = "cpu"
    tied: tuple[tuple[str, ...], ...] = ()
    offload_buffers: bool = False
    ahead: int = attrs.field(default=1, validator=at_least(0))
    room: int = attrs.field(default=0, validator=at_least(0))
    staging: int = attrs.field(default=0, validator=at_least(0))
    reserved: tuple[Room, ...] = ()
    dtypes: tuple[DtypeRule, ...] = ()

    def __attrs_post_init__(self) -> None:
        seen: set[str] = set()
        for name in (unit.name for unit in self.units):
            if name in seen:
                raise PlanError(f"Placement(units=...): {name!r} is listed twice. Keep one unit.")
            seen.add(name)
        if self.device == DISK:
            raise PlanError(
                "Placement(device='disk'): nothing computes on disk. Choose a device or 'cpu'."
            )

    @property
    def devices(self) -> tuple[str, ...]:
        """Everything that holds a unit, `device` first and "cpu" and "disk" last."""
        found = dict.fromkeys([self.device, *(unit.device for unit in self.units)])
        last = [name for name in ("cpu", DISK) if name in found and name != self.device]
        return (*(name for name in found if name not in last), *last)

    @property
    def streamed(self) -> tuple[PlacedUnit, ...]:
        """Units that are held elsewhere than where they compute."""
        return tuple(unit for unit in self.units if self.computes_on(unit) != unit.device)

    def computes_on(self, unit: PlacedUnit) -> str:
        """The device on which a unit computes."""
        return self.device if unit.device in ("cpu", DISK) else unit.device

    def bytes_on(self, device: str) -> int:
        """Bytes that the placement takes of a device, the CPU or the disk, with all its room."""
        total = sum(room.bytes for room in self.reserved if room.device == device)
        total += self.room if device == self.device else 0
        total += self.staging if device == "cpu" else 0
        for unit in self.units:
            computes = self.computes_on(unit)
            kept = unit.buffers if computes != unit.device else 0
            total += unit.bytes - kept if unit.device == device else 0
            total += unit.working + kept if computes == device else 0
        return total


def units_by_name(placement: Placement) -> dict[str, PlacedUnit]:
    """The units of a placement by name.

    Example:
        >>> from fxtrain.state import PlacedUnit, Placement, units_by_name
        >>> list(units_by_name(Placement(units=(PlacedUnit(name="a", device="cpu"),))))
        ['a']
    """
    return {unit.name: unit for unit in placement.units}


def owner_of(units: Mapping[str, PlacedUnit], tensor: str) -> PlacedUnit:
    """The unit that a parameter or buffer belongs to.

    Raises:
        PlanError: it belongs to none.

    Example:
        >>> from fxtrain.state import PlacedUnit, owner_of
        >>> owner_of({"a": PlacedUnit(name="a", device="cpu")}, "a.b.weight").name
        'a'
    """
    for name in _prefixes(tensor):
        if name in units:
            return units[name]
    near = closest(tensor, units)
    raise PlanError(
        f"The placement says nothing of the tensor {tensor!r}.{near} Add a unit for it or for one "
        f"of its modules, or a unit '' for everything that no other unit contains."
    )


def dtype_of(rules: tuple[DtypeRule, ...], tensor: str) -> str | None:
    """The dtype that rules give a parameter; None if it keeps its own.

    Example:
        >>> from fxtrain.state import DtypeRule, dtype_of
        >>> rules = (DtypeRule(match="*norm*", dtype="float32"),)
        >>> dtype_of(rules, "layers.0.norm.weight"), dtype_of(rules, "head.weight")
        ('float32', None)
    """
    return next((rule.dtype for rule in rules if fnmatchcase(tensor, rule.match)), None)


def tier_of(device: str) -> str:
    """The tier of a device: "device", "cpu" or "disk".

    Example:
        >>> from fxtrain.state import tier_of
        >>> tier_of("cuda:0"), tier_of("cpu"), tier_of("disk")
        ('device', 'cpu', 'disk')
    """
    return device if device in ("cpu", DISK) else "device"


def _prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
