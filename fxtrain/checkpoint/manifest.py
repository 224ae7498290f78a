"""The manifest: the contents of a checkpoint, their location, and digests to verify them.

The file is one line of JSON, `{"digest":"…","manifest":{…}}`. The digest covers the bytes of the
inner object, so that a change of any byte of the file is detected.
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

from fxtrain._display import counted
from fxtrain._errors import CheckpointError, PlanError
from fxtrain.checkpoint.owner import Owner, owner_from
from fxtrain.models.tensor_bytes import DTYPES
from fxtrain.state import Position, parse_json, structure, unstructure

__all__ = ["CHUNK", "FORMAT", "HIGHEST", "MANIFEST", "Entry", "File", "Manifest", "Part"]
__all__ += ["NewerFormatError", "digest_of", "dump_manifest", "is_partition", "load_manifest"]

FORMAT = 1
MANIFEST = "manifest.json"
CHUNK = 4 << 20  # bytes of a part that share a digest; reads verify complete chunks
HIGHEST = (1 << 63) - 1  # limit of sizes, offsets and orders
_MAX_BYTES = 1 << 30  # bytes of a manifest
_DIMS = 64  # torch's limit
_SPREAD_DIMS = 8  # dimensions along which a tensor is split; a mesh has fewer axes
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_HEAD, _MIDDLE, _TAIL = b'{"digest":"', b'","manifest":', b"}\n"


class NewerFormatError(CheckpointError):
    """A newer fxtrain wrote the checkpoint, so this version cannot check it."""

    code = "FX604"


@attrs.frozen(kw_only=True)
class Part:
    """A box of a tensor, stored contiguously in one file.

    Attributes:
        file: Name of the file.
        offset: Offset of its first byte in the file.
        start: Offset of the box in the tensor, per dimension.
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
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize


@attrs.frozen(kw_only=True)
class File:
    """A data file: its bytes, those of its header, and the digest of the header."""

    size: int
    header: int
    digest: str


@attrs.frozen(kw_only=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        versions: Versions of fxtrain and torch, for information.
        topology: `world_size` and `mesh` of the ranks that saved; `order`, higher than that of
            every checkpoint in the folder at the time; `saver`, the process of rank 0.
        position: Position of the run in its data.
        metric: The number that `keep_best` compares, or None.
        models: Per model, its `plan`, the plan's `fingerprint` and its `values`.
        extra: The user's state.
        tensors: Tensors that all ranks share, by name.
        aliases: Names of tensors that share the memory of another.
        own: Per-rank tensors, for each rank that saved.
        files: Data files by name.
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
        """Commit order among the checkpoints of its folder; the newest has the highest."""
        return self.topology.get("order", 0)

    @property
    def saver(self) -> Owner | None:
        """The process that committed it, if recorded."""
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
    """Parse the bytes of the file, and validate every field.

    Raises:
        CheckpointError: a byte has changed, or the manifest is inconsistent. Raised before
            anything is opened or allocated from its content.
        NewerFormatError: this version does not know its format.
    """
    data = _parse(_body(raw))
    _check_format(data)
    _keys(data, {"format", *attrs.fields_dict(Manifest)}, "the manifest")
    try:
        return _manifest(data)
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"The manifest is malformed: {str(error)[:500]}.", code="FX602"
        ) from error


def _check_format(data: Mapping[str, Any]) -> None:
    """Check the format first: the other fields of a newer format are unknown."""
    found = data.get("format")
    if type(found) is not int or found < 1:
        raise CheckpointError(
            f"The manifest is malformed: its format is {str(found)[:80]!r}.", code="FX602"
        )
    if found > FORMAT:
        raise NewerFormatError(
            f"It was written by a newer fxtrain (format {str(found)[:80]}; this version reads "
            f"{FORMAT}). Update fxtrain, or use a checkpoint that this version wrote."
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
            f"{MANIFEST} ({len(raw)} bytes) is not a manifest, or was truncated or changed.",
            code="FX602",
        )
    body = view[middle + len(_MIDDLE) : -len(_TAIL)]
    found = digest_of(body)
    if view[start:middle] != found.encode():
        raise CheckpointError(
            f"{MANIFEST} was changed: its digest is {found}, but it records "
            f"{bytes(view[start:middle])!r}.",
            code="FX602",
        )
    return body


def _parse(body: memoryview) -> dict[str, Any]:
    try:
        data = parse_json(bytes(body))
    except ValueError as error:
        raise CheckpointError(
            f"The manifest is not JSON: {str(error).rstrip('.')}.", code="FX602"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError("The manifest is not a JSON object.", code="FX602")
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
            raise ValueError(f"{name!r} is not a valid alias of the tensor {target!r}")
    metric = data["metric"]
    if metric is not None and not (type(metric) in (int, float) and math.isfinite(metric)):
        raise ValueError(f"the metric {str(metric)[:80]} is not a number")
    ranks = _count(_table(data["topology"])["world_size"])
    _count(data["topology"].get("order", 0))
    if data["topology"].get("saver") is not None:
        owner_from(data["topology"]["saver"])
    if not ranks or ranks != len(own):
        raise ValueError(f"{counted(ranks, 'rank')} saved, but there are states of {len(own)}")
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
        raise ValueError(f"{name} has an unknown dtype {data['dtype']!r}")
    shape = _shape(data["shape"])
    itemsize = DTYPES[data["dtype"]].itemsize
    parts = tuple(_part(part, name, shape, itemsize, files) for part in _list(data["parts"]))
    if not is_partition(shape, parts):
        raise ValueError(f"the parts of {name} overlap or do not cover {list(shape)}")
    return Entry(dtype=data["dtype"], shape=shape, parts=parts)


def _part(
    data: Any, name: str, full_shape: tuple[int, ...], itemsize: int, files: Mapping[str, File]
) -> Part:
    _keys(data, {"file", "offset", "start", "shape", "digests"}, f"a part of {name}")
    start, shape = _shape(data["start"]), _shape(data["shape"])
    if not len(start) == len(shape) == len(full_shape) or any(
        begin + size > full for begin, size, full in zip(start, shape, full_shape, strict=True)
    ):
        raise ValueError(
            f"a part of {name} at {start} of shape {shape} is not inside {list(full_shape)}"
        )
    file = files.get(data["file"])
    offset, size = _count(data["offset"]), math.prod(shape) * itemsize
    if file is None or not file.header <= offset <= offset + size <= file.size:
        raise ValueError(f"a part of {name} is not inside the file {data['file']!r}")
    digests = tuple(_hash(one) for one in _list(data["digests"]))
    if len(digests) != -(-size // CHUNK):
        raise ValueError(f"a part of {name} has {len(digests)} digests for {size} bytes")
    return Part(file=data["file"], offset=offset, start=start, shape=shape, digests=digests)


def is_partition(shape: tuple[int, ...], parts: tuple[Part, ...]) -> bool:
    """Whether the boxes of the parts, each inside the tensor, partition it.

    They do if the signed corners of all boxes add up to those of the tensor, because inner
    corners cancel. (The mixed derivative of a sum of boxes is a sum of such corners, and
    determines it.)
    """
    if not math.prod(shape):
        return True
    boxes = [(part.start, part.shape) for part in parts if math.prod(part.shape)]
    dims = [dim for dim, size in enumerate(shape) if any(box[dim] != size for _, box in boxes)]
    if len(dims) > _SPREAD_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, start, size in [(-1, (0,) * len(shape), shape), *((1, *box) for box in boxes)]:
        for far in itertools.product((0, 1), repeat=len(dims)):
            corner = tuple(start[dim] + one * size[dim] for dim, one in zip(dims, far, strict=True))
            corners[corner] += sign * (-1) ** sum(far)
    return not any(corners.values())


def _check_disjoint(files: Mapping[str, File], entries: Iterable[Entry]) -> None:
    """Raise if two parts share bytes, or if bytes belong to no part."""
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    for entry in entries:
        for part in entry.parts:
            size = math.prod(part.shape) * entry.itemsize
            if size:
                spans[part.file].append((part.offset, part.offset + size))
    for name, found in spans.items():
        offset = files[name].header
        for begin, end in sorted(found):
            if begin != offset:
                raise ValueError(f"parts in {name} overlap or have a gap at byte {offset}")
            offset = end
        if offset != files[name].size:
            raise ValueError(f"{name} has bytes after {offset} that belong to no tensor")


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
            f"The manifest is malformed: {what[:200]} should have the keys {sorted(wanted)}, "
            f"found {str(found)[:500]}.",
            code="FX602",
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
        raise ValueError(f"{str(value)[:80]} is not a size or an offset")
    return value


def _shape(data: Any) -> tuple[int, ...]:
    sizes = tuple(_count(size) for size in _list(data))
    if len(sizes) > _DIMS:
        raise ValueError(f"a tensor has {len(sizes)} dimensions")
    return sizes


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is not a digest")
    return value
