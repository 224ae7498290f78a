"""The manifest: the contents of a checkpoint, their location, and digests to verify them.

The file is one line of JSON, `{"digest":"…","manifest":{…}}`. The digest covers the bytes of the
inner object, so that a change of any byte of the file is detected.
"""

import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import xxhash

from fxtrain.checkpoint.folder_lock import Owner, owner_from
from fxtrain.checkpoint.storage import MANIFEST
from fxtrain.errors import CheckpointError, PlanError
from fxtrain.models.tensor_bytes import DTYPES
from fxtrain.state import Position
from fxtrain.state.parsing import parse_json

FORMAT = 1
CHUNK = 4 << 20  # bytes of a stored box that share a digest; reads verify complete chunks
HIGHEST = (1 << 63) - 1  # limit of sizes, offsets and orders
_MAX_BYTES = 1 << 30  # bytes of a manifest
_MAX_DIMS = 64  # torch's limit
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
# What a field that is missing, unknown or of another type raises.
_WRONG = (
    PlanError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_HEAD, _MIDDLE, _TAIL = b'{"digest":"', b'","manifest":', b"}\n"

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset in a tensor and shape


class NewerFormatError(CheckpointError):
    """A newer fxtrain wrote the checkpoint, so this version cannot check it."""

    code = "FX604"


@attrs.frozen(kw_only=True)
class StoredBox:
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
class StoredTensor:
    """A tensor: its dtype, its shape over all ranks, and the boxes that partition it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredBox, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize


@attrs.frozen(kw_only=True)
class DataFile:
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
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    own: tuple[Mapping[str, StoredTensor], ...]
    files: Mapping[str, DataFile]

    @property
    def order(self) -> int:
        """Commit order among the checkpoints of its folder; the newest has the highest."""
        return self.topology.get("order", 0)

    @property
    def saver(self) -> Owner | None:
        """The process that committed it, if recorded."""
        owner = self.topology.get("saver")
        return None if owner is None else owner_from(owner)


digest_of = xxhash.xxh3_128_hexdigest  # the digest of some bytes


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file."""
    data = {"format": FORMAT, **attrs.asdict(manifest)}
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    return _HEAD + digest_of(body).encode() + _MIDDLE + body + _TAIL


def load_manifest(raw: bytes) -> Manifest:
    """Parse the bytes of the file, and validate every field.

    Raises:
        CheckpointError: a byte has changed, or the manifest is inconsistent. Raised before
            anything is opened or allocated from its content.
        NewerFormatError: this version does not know its format.
    """
    body = _body(raw)
    try:
        data = parse_json(bytes(body))
        # The format comes first: the other fields of a newer format are unknown.
        number = data.pop("format", None) if isinstance(data, dict) else None
        if type(number) is not int or number < 1:
            raise ValueError(f"its format is {str(number)[:80]!r}")
        if number <= FORMAT:
            return _manifest_of(data)
    except _WRONG as error:
        problem = str(error)[:500].rstrip(".")
        raise CheckpointError(f"The manifest is malformed: {problem}.", code="FX602") from None
    raise NewerFormatError(
        f"It was written by a newer fxtrain (format {str(number)[:80]}; this version reads "
        f"{FORMAT}). Update fxtrain, or use a checkpoint that this version wrote."
    )


def _body(raw: bytes) -> memoryview:
    """The inner object of the file, as it was written."""
    view, middle = memoryview(raw), len(_HEAD) + 32
    begin = middle + len(_MIDDLE)
    if (
        len(raw) > _MAX_BYTES
        or view[: len(_HEAD)] != _HEAD
        or view[middle:begin] != _MIDDLE
        or view[-len(_TAIL) :] != _TAIL
    ):
        raise CheckpointError(
            f"{MANIFEST} ({len(raw)} bytes) is not a manifest, or was truncated or changed.",
            code="FX602",
        )
    body, recorded = view[begin : -len(_TAIL)], view[len(_HEAD) : middle]
    digest = digest_of(body)
    if recorded != digest.encode():
        raise CheckpointError(
            f"{MANIFEST} was changed: its digest is {digest}, but it records {bytes(recorded)!r}.",
            code="FX602",
        )
    return body


def _manifest_of(data: dict[str, Any]) -> Manifest:
    """The manifest, after checking each field and what the fields say about each other.

    Raises:
        ValueError: a field is not as it was written, or contradicts another one.
        TypeError: a field is missing, unknown, or of another type.
    """
    files = {name: DataFile(**fields) for name, fields in _table(data, "files").items()}
    spans = {name: [(0, _header_size(name, file))] for name, file in files.items()}
    own = [
        {name: _tensor_of(name, fields, files, spans) for name, fields in table.items()}
        for table in data["own"]
    ]
    shared = _table(data, "tensors")
    tensors = {name: _tensor_of(name, fields, files, spans) for name, fields in shared.items()}
    for name, used in spans.items():  # every byte belongs to the header or to one tensor
        end = 0
        for offset, size in (*sorted(used), (files[name].size, 0)):
            if offset != end:
                raise ValueError(f"parts in {name} overlap or have a gap at byte {end}")
            end += size
    for name, target in _table(data, "aliases").items():
        if target not in tensors or name in tensors:
            raise ValueError(f"{name!r} is not a valid alias of the tensor {target!r}")
    data |= {"files": files, "tensors": tensors, "own": tuple(own)}
    *numbers, is_last = attrs.astuple(position := Position(**data["position"]))
    if {*map(type, numbers)} != {int} or type(is_last) is not bool:
        raise ValueError(f"the position {str(position)[:200]} is not one of a run")
    data["position"] = position
    manifest = Manifest(**data)
    _check_run(manifest)
    return manifest


def _header_size(name: str, file: DataFile) -> int:
    if not _FILE_NAME.fullmatch(name) or not _DIGEST.fullmatch(file.digest):
        raise ValueError(f"{name[:200]!r} is not the name of a data file with a digest")
    if not _are_counts(file.size, file.header) or not 8 <= file.header <= _MAX_BYTES:
        raise ValueError(f"{name} has a header of {str(file.header)[:80]} bytes")
    return file.header


def _check_run(manifest: Manifest) -> None:
    """Check what a manifest says of the run, beside its tensors."""
    ranks, metric = manifest.topology.get("world_size"), manifest.metric
    if not _are_counts(ranks, manifest.order) or not ranks or ranks != len(manifest.own):
        raise ValueError(
            f"a world size of {str(ranks)[:80]}, with states of {len(manifest.own)}, or the order "
            f"{str(manifest.order)[:80]}"
        )
    if metric is not None and (type(metric) not in (int, float) or not math.isfinite(metric)):
        raise ValueError(f"the metric {str(metric)[:80]} is not a number")
    for name, model in manifest.models.items():
        if (
            model.keys() != {"plan", "fingerprint", "values"}
            or type(model["fingerprint"]) is not str
        ):
            raise ValueError(f"the model {name!r} needs a plan, a fingerprint and values")
    _ = manifest.saver  # raises if it does not describe a process


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(data[name], dict):
        raise TypeError(f"{name} is not a table")
    return data[name]


def _are_counts(*values: Any) -> bool:
    """Whether all values are sizes, offsets or orders."""
    return set(map(type, values)) <= {int} and min(values) >= 0 and max(values) <= HIGHEST


def _tensor_of(
    name: str,
    fields: dict[str, Any],
    files: Mapping[str, DataFile],
    spans: dict[str, list[tuple[int, int]]],
) -> StoredTensor:
    """A tensor; the offset and size of each part are added to the spans of its file."""
    full, dtype = tuple(fields["shape"]), fields["dtype"]
    if dtype not in DTYPES or len(full) > _MAX_DIMS or not _are_counts(0, *full):
        raise ValueError(f"{name} has the dtype {str(dtype)[:80]!r} and {len(full)} dimensions")
    parts, boxes = list[StoredBox](), list[Box]()
    for box in fields["parts"]:
        start, shape, digests = tuple(box["start"]), tuple(box["shape"]), tuple(box["digests"])
        part = StoredBox(**box | {"start": start, "shape": shape, "digests": digests})
        same_dims = len(start) == len(shape) == len(full)
        if not same_dims or not _are_counts(part.offset, *start, *shape):
            raise ValueError(f"a part of {name} is not at an offset in a file and a tensor")
        if any(map(operator.gt, map(operator.add, start, shape), full)):
            raise ValueError(f"a part of {name}, {shape} at {start}, is not inside {full}")
        file, size = files.get(part.file), math.prod(shape) * DTYPES[dtype].itemsize
        if file is None or not file.header <= part.offset <= part.offset + size <= file.size:
            raise ValueError(f"a part of {name} is not inside the file {str(part.file)[:200]!r}")
        if len(digests) != -(-size // CHUNK) or not all(map(_DIGEST.fullmatch, digests)):
            raise ValueError(f"a part of {name} needs a digest for each {CHUNK} of {size} bytes")
        if size:
            spans[part.file].append((part.offset, size))
        parts.append(part)
        boxes.append((start, shape))
    if boxes != [((0,) * len(full), full)] and not covers(full, boxes):
        raise ValueError(f"the parts of {name} overlap or do not cover {list(full)}")
    return StoredTensor(**fields | {"shape": full, "parts": tuple(parts)})


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes lie inside a shape and have as many elements as it has.

    Writers never write an element twice, so that such boxes cover all of them.
    """
    inside = all(
        0 <= at <= at + length <= size
        for start, part in boxes
        for at, length, size in zip(start, part, shape, strict=True)
    )
    return inside and sum(math.prod(part) for _, part in boxes) == math.prod(shape)
