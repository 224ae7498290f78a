"""The manifest: what a checkpoint holds, where, and how to know that it is intact.

The file is one line of JSON, `{"digest":"…","manifest":{…}}`, in which the digest is that of
the bytes of the inner object: no byte of the file can change unnoticed.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import xxhash

from fxtrain._errors import CheckpointError, PlanError
from fxtrain.checkpoint.owner import Owner, owner_from
from fxtrain.models.tensor_bytes import DTYPES
from fxtrain.state import Position, parse_json, structure, unstructure

__all__ = ["CHUNK", "FORMAT", "HIGHEST", "MANIFEST", "Entry", "File", "Manifest", "Part"]
__all__ += ["NewerFormatError", "digest_of", "dump_manifest", "load_manifest"]

FORMAT = 1
MANIFEST = "manifest.json"
CHUNK = 4 << 20  # bytes of a part that share a digest; a slice is read and checked in these
HIGHEST = (1 << 63) - 1  # of sizes, places and orders
_MAX_BYTES = 1 << 30  # bytes of a manifest
_DIMS = 64  # torch has no more
_SPREAD_DIMS = 8  # in which one tensor is cut; a mesh has fewer axes
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_HEAD, _MIDDLE, _TAIL = b'{"digest":"', b'","manifest":', b"}\n"


class NewerFormatError(CheckpointError):
    """A checkpoint that a newer fxtrain wrote: whole perhaps, but not for this one to judge."""


@attrs.frozen(kw_only=True)
class Part:
    """A box of a tensor, whole in one file.

    Attributes:
        file: Name of the file.
        offset: First byte in it.
        start: Where the box stands in the tensor, per dimension.
        shape: Size of the box.
        digests: One per `CHUNK` bytes.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    digests: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Entry:
    """A tensor: its dtype, its shape over all ranks, and its parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return DTYPES[self.dtype].itemsize


@attrs.frozen(kw_only=True)
class File:
    """A data file: its bytes, those of its header, and the digest of the header."""

    size: int
    header: int
    digest: str


@attrs.frozen(kw_only=True)
class Manifest:
    """All that a checkpoint says of itself.

    Attributes:
        versions: Of fxtrain and torch, for people.
        topology: `world_size` and `mesh` of the ranks that saved; `order`, which is higher than
            that of every checkpoint that was in the folder; `saver`, the process of rank 0.
        position: Where the run stood in its data.
        metric: What `keep_best` goes by, or None.
        models: Per model: its `plan`, the plan's `fingerprint`, its `values`.
        extra: The user's state.
        tensors: By name.
        aliases: Names of tensors that share the memory of another.
        own: Per rank that saved, the tensors that belong to it alone.
        files: By name.
    """

    versions: Mapping[str, str]
    topology: Mapping[str, Any]
    position: Position
    metric: float | None
    models: Mapping[str, Any]
    extra: Any
    tensors: Mapping[str, Entry]
    aliases: Mapping[str, str]
    own: tuple[Mapping[str, Entry], ...]
    files: Mapping[str, File]

    @property
    def order(self) -> int:
        """Where it stands among the checkpoints of its folder, the newest last."""
        return self.topology.get("order", 0)

    @property
    def saver(self) -> Owner | None:
        """The process that committed it, where it was written down."""
        found = self.topology.get("saver")
        return None if found is None else owner_from(found)


def digest_of(data: Any) -> str:
    """The digest of some bytes: XXH3, 128 bits."""
    return xxhash.xxh3_128_hexdigest(data)


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file."""
    data = {
        "format": FORMAT,
        **attrs.asdict(manifest, recurse=False),
        "position": unstructure(manifest.position),
        "tensors": _entries(manifest.tensors),
        "own": [_entries(one) for one in manifest.own],
        "files": {name: attrs.asdict(file) for name, file in manifest.files.items()},
    }
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    return _HEAD + digest_of(body).encode() + _MIDDLE + body + _TAIL


def load_manifest(raw: bytes) -> Manifest:
    """Read the bytes of the file, and believe nothing that does not hold together.

    Raises:
        CheckpointError: a byte has changed, or the manifest contradicts itself; before
            anything is opened or allocated by what it says.
        NewerFormatError: it is of a format that this version does not know.
    """
    data = _parse(_body(raw))
    _check_format(data)
    _keys(data, {"format", *attrs.fields_dict(Manifest)}, "the manifest")
    try:
        return _manifest(data)
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"The manifest is malformed: {str(error)[:500]}.") from error


def _check_format(data: Mapping[str, Any]) -> None:
    """Before anything else, since of a newer format nothing else is known."""
    found = data.get("format")
    if type(found) is not int or found < 1:
        raise CheckpointError(f"The manifest is malformed: its format is {str(found)[:80]!r}.")
    if found > FORMAT:
        raise NewerFormatError(
            f"It was written by a newer fxtrain (format {str(found)[:80]}; this one reads "
            f"{FORMAT}): update fxtrain, or name a checkpoint that this version wrote."
        )


def _body(raw: bytes) -> memoryview:
    start, middle = len(_HEAD), len(_HEAD) + 32
    view = memoryview(raw)
    framed = (
        len(raw) <= _MAX_BYTES
        and view[:start] == _HEAD
        and view[middle : middle + len(_MIDDLE)] == _MIDDLE
        and view[-len(_TAIL) :] == _TAIL
    )
    if not framed:
        raise CheckpointError(
            f"{MANIFEST} of {len(raw)} bytes is not a manifest, or was cut or changed."
        )
    body = view[middle + len(_MIDDLE) : -len(_TAIL)]
    found = digest_of(body)
    if view[start:middle] != found.encode():
        raise CheckpointError(
            f"{MANIFEST} was changed: its digest is {found}, and it says "
            f"{bytes(view[start:middle])!r}."
        )
    return body


def _parse(body: memoryview) -> dict[str, Any]:
    try:
        data = parse_json(bytes(body))
    except RecursionError:
        raise CheckpointError("The manifest is nested too deep.") from None
    except ValueError as error:
        raise CheckpointError(f"The manifest is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError("The manifest is not a JSON object.")
    return data


def _manifest(data: dict[str, Any]) -> Manifest:
    files = {_file_name(name): _file(one, name) for name, one in _table(data["files"]).items()}
    tensors = {n: _entry(one, n, files) for n, one in _table(data["tensors"]).items()}
    own = tuple(
        {n: _entry(one, n, files) for n, one in _table(rank).items()} for rank in _list(data["own"])
    )
    _check_disjoint(files, [*tensors.values(), *(entry for rank in own for entry in rank.values())])
    aliases = _table(data["aliases"])
    for name, target in aliases.items():
        if target not in tensors or name in tensors:
            raise ValueError(f"{name!r} is said to be the tensor {target!r}, which is not there")
    metric = data["metric"]
    if metric is not None and not (type(metric) in (int, float) and math.isfinite(metric)):
        raise ValueError(f"the metric {str(metric)[:80]} is not a number")
    ranks = _count(_table(data["topology"])["world_size"])
    _count(data["topology"].get("order", 0))
    if data["topology"].get("saver") is not None:
        owner_from(data["topology"]["saver"])
    if not ranks or ranks != len(own):
        raise ValueError(f"{ranks} ranks saved, and there are states of {len(own)}")
    try:
        position = structure(data["position"], Position, ())
    except PlanError as error:
        raise ValueError(str(error)) from error
    return Manifest(
        versions={name: str(one) for name, one in _table(data["versions"]).items()},
        topology=data["topology"],
        position=position,
        metric=metric,
        models=_models(data["models"]),
        extra=data["extra"],
        tensors=tensors,
        aliases=aliases,
        own=own,
        files=files,
    )


def _models(data: Any) -> dict[str, Any]:
    for name, model in _table(data).items():
        _keys(model, {"plan", "fingerprint", "values"}, f"the model {name!r}")
        if not isinstance(model["fingerprint"], str):
            raise ValueError(f"the fingerprint of {name!r} is not a string")
    return data


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name[:200]!r} is not the name of a data file")
    return name


def _file(data: Any, name: str) -> File:
    _keys(data, {"size", "header", "digest"}, name)
    size, header = _count(data["size"]), _count(data["header"])
    if not 8 <= header <= min(size, _MAX_BYTES):
        raise ValueError(f"{name} has a header of {header} bytes in {size}")
    return File(size=size, header=header, digest=_hash(data["digest"]))


def _entry(data: Any, name: str, files: Mapping[str, File]) -> Entry:
    _keys(data, {"dtype", "shape", "parts"}, name)
    if data["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {data['dtype']!r}")
    shape = _shape(data["shape"])
    itemsize = DTYPES[data["dtype"]].itemsize
    parts = tuple(_part(part, name, shape, itemsize, files) for part in _list(data["parts"]))
    if not _covers(shape, parts):
        raise ValueError(f"the parts of {name} overlap or do not cover {list(shape)}")
    return Entry(dtype=data["dtype"], shape=shape, parts=parts)


def _part(
    data: Any, name: str, whole: tuple[int, ...], itemsize: int, files: Mapping[str, File]
) -> Part:
    _keys(data, {"file", "offset", "start", "shape", "digests"}, f"a part of {name}")
    start, shape = _shape(data["start"]), _shape(data["shape"])
    if not len(start) == len(shape) == len(whole) or any(
        begin + size > room for begin, size, room in zip(start, shape, whole, strict=True)
    ):
        raise ValueError(f"a part of {name} at {start} of {shape} is not inside {list(whole)}")
    file = files.get(data["file"])
    offset, size = _count(data["offset"]), math.prod(shape) * itemsize
    if file is None or not file.header <= offset <= offset + size <= file.size:
        raise ValueError(f"a part of {name} is not inside the file {data['file']!r}")
    digests = tuple(_hash(one) for one in _list(data["digests"]))
    if len(digests) != -(-size // CHUNK):
        raise ValueError(f"a part of {name} has {len(digests)} digests for {size} bytes")
    return Part(file=data["file"], offset=offset, start=start, shape=shape, digests=digests)


def _covers(shape: tuple[int, ...], parts: tuple[Part, ...]) -> bool:
    """Whether boxes, each inside the tensor, are disjoint and fill it.

    They do if the signed corners of all boxes are those of the whole: corners inside cancel.
    (The mixed derivative of a sum of boxes is a sum of such corners, and determines it.)
    """
    if not math.prod(shape):
        return True
    boxes = [(part.start, part.shape) for part in parts if math.prod(part.shape)]
    cut = [dim for dim, size in enumerate(shape) if any(box[dim] != size for _, box in boxes)]
    if len(cut) > _SPREAD_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, start, size in [(-1, (0,) * len(shape), shape), *((1, *box) for box in boxes)]:
        for far in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(start[dim] + one * size[dim] for dim, one in zip(cut, far, strict=True))
            corners[corner] += sign * (-1) ** sum(far)
    return not any(corners.values())


def _check_disjoint(files: Mapping[str, File], entries: Iterable[Entry]) -> None:
    """Refuse two parts that share bytes, and bytes that belong to none."""
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for entry in entries:
        for part in entry.parts:
            size = math.prod(part.shape) * entry.itemsize
            if size:
                spans[part.file].append((part.offset, part.offset + size))
    for name, found in spans.items():
        place = files[name].header
        for begin, end in sorted(found):
            if begin != place:
                raise ValueError(f"parts in {name} overlap or leave bytes out at {place}")
            place = end
        if place != files[name].size:
            raise ValueError(f"{name} has bytes after {place} that belong to no tensor")


def _entries(entries: Mapping[str, Entry]) -> dict[str, Any]:
    return {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "parts": [attrs.asdict(part, recurse=False) for part in entry.parts],
        }
        for name, entry in entries.items()
    }


def _keys(data: Any, wanted: set[str], what: str) -> None:
    if not isinstance(data, dict) or data.keys() != wanted:
        found = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise CheckpointError(
            f"The manifest is malformed: {what[:200]} should have {sorted(wanted)}, "
            f"found {str(found)[:500]}."
        )


def _table(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"an object was expected, found {type(data).__name__}")
    return data


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"a list was expected, found {type(data).__name__}")
    return data


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= HIGHEST:
        raise ValueError(f"{str(value)[:80]} is not a size or a place")
    return value


def _shape(data: Any) -> tuple[int, ...]:
    sizes = tuple(_count(size) for size in _list(data))
    if len(sizes) > _DIMS:
        raise ValueError(f"a tensor of {len(sizes)} dimensions")
    return sizes


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is not a digest")
    return value
