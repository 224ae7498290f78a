"""The manifest: the contents of a checkpoint, their location, and digests to verify them.

The file is one line of JSON, `{"digest":"…","manifest":{…}}`. The digest covers the bytes of the
inner object, so that a change of any byte of the file is detected.
"""

import functools
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import cattrs
import xxhash
from cattrs.v import transform_error

from fxtrain._display import counted
from fxtrain.checkpoint.folder_lock import Owner, owner_from
from fxtrain.checkpoint.storage import MANIFEST
from fxtrain.errors import CheckpointError
from fxtrain.models.tensor_bytes import DTYPES
from fxtrain.state import Position, structure, unstructure
from fxtrain.state.parsing import parse_json

FORMAT = 1
CHUNK = 4 << 20  # bytes of a stored box that share a digest; reads verify complete chunks
HIGHEST = (1 << 63) - 1  # limit of sizes, offsets and orders
_MAX_BYTES = 1 << 30  # bytes of a manifest
_MAX_DIMS = 64  # torch's limit
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
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


def digest_of(data: Any) -> str:
    """The digest of some bytes: XXH3, 128 bits."""
    return xxhash.xxh3_128_hexdigest(data)


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file."""
    data = {"format": FORMAT, **attrs.asdict(manifest, recurse=False)}
    data["position"] = unstructure(manifest.position)
    for name in ("tensors", "files"):
        data[name] = _plain(data[name])
    data["own"] = [_plain(tensors) for tensors in manifest.own]
    body = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    return _HEAD + digest_of(body).encode() + _MIDDLE + body + _TAIL


def _plain(records: Mapping[str, Any]) -> dict[str, Any]:
    return {name: attrs.asdict(record) for name, record in records.items()}


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
            manifest = _converter().structure(data, Manifest)
            _check(manifest)
            return manifest
    except cattrs.BaseValidationError as error:
        problem = transform_error(error, "the manifest", _text_of)[0]
    except (ValueError, RecursionError) as error:
        problem = str(error)
    else:
        raise NewerFormatError(
            f"It was written by a newer fxtrain (format {str(number)[:80]}; this version reads "
            f"{FORMAT}). Update fxtrain, or use a checkpoint that this version wrote."
        )
    raise CheckpointError(f"The manifest is malformed: {problem[:500].rstrip('.')}.", code="FX602")


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


@functools.cache  # building one generates code; a converter is never changed afterwards
def _converter() -> cattrs.Converter:
    """A converter that takes each value only in the type in which it was written."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(int, _count)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(str, _string)
    converter.register_structure_hook(Position, lambda data, _: structure(data, Position, ()))
    for kind, hook in ((tuple[int, ...], _counts), (tuple[str, ...], _digests)):
        converter.register_structure_hook_func(functools.partial(operator.eq, kind), hook)
    return converter


def _count(value: Any, _: Any = None) -> int:
    if type(value) is not int or not 0 <= value <= HIGHEST:
        raise ValueError(f"{str(value)[:80]} is not a size or an offset")
    return value


def _number(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:80]} is not a number")
    return value


def _string(value: Any, _: Any = None) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]} is not a string")
    return value


def _counts(data: Any, _: Any) -> tuple[int, ...]:
    # One frame for all: most of a manifest are numbers.
    if type(data) is not list or not set(map(type, data)) <= {int}:
        raise ValueError(f"{str(data)[:80]} is not a list of sizes or offsets")
    if data and not 0 <= min(data) <= max(data) <= HIGHEST:
        raise ValueError(f"{str(data)[:80]} has a number that is not a size or an offset")
    return tuple(data)


def _digests(data: Any, _: Any) -> tuple[str, ...]:
    if type(data) is not list or not set(map(type, data)) <= {str}:
        raise ValueError(f"{str(data)[:80]} is not a list of digests")
    if not all(map(_DIGEST.fullmatch, data)):
        raise ValueError(f"{str(data)[:80]} has text that is not a digest")
    return tuple(data)


def _text_of(error: BaseException, _: Any) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)[:400]


def _check(manifest: Manifest) -> None:
    """Check what the fields say about each other.

    Raises:
        ValueError: they contradict each other.
    """
    _check_files(manifest)
    for name, target in manifest.aliases.items():
        if target not in manifest.tensors or name in manifest.tensors:
            raise ValueError(f"{name!r} is not a valid alias of the tensor {target!r}")
    ranks = _count(manifest.topology.get("world_size"))
    if not ranks or ranks != len(manifest.own):
        saved = counted(ranks, "rank")
        raise ValueError(f"{saved} saved, but there are states of {len(manifest.own)}")
    _count(manifest.order)
    _ = manifest.saver  # raises if it does not describe a process
    for name, model in manifest.models.items():
        if not isinstance(model, dict) or model.keys() != {"plan", "fingerprint", "values"}:
            raise ValueError(f"the model {name!r} needs a plan, a fingerprint and values")
        _string(model["fingerprint"])


def _check_files(manifest: Manifest) -> None:
    """Check that every byte of every file belongs to its header or to one part of a tensor."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name[:200]!r} is not the name of a data file")
        if not 8 <= file.header <= min(file.size, _MAX_BYTES):
            raise ValueError(f"{name} has a header of {file.header} bytes in {file.size}")
        _digests([file.digest], None)
        spans[name] = [(0, file.header)]
    for table in (manifest.tensors, *manifest.own):
        for name, tensor in table.items():
            _check_tensor(name, tensor, manifest.files, spans)
    for name, used in spans.items():
        end = 0
        for offset, size in (*sorted(used), (manifest.files[name].size, 0)):
            if offset != end:
                raise ValueError(f"parts in {name} overlap or have a gap at byte {end}")
            end += size


def _check_tensor(
    name: str,
    tensor: StoredTensor,
    files: Mapping[str, DataFile],
    spans: dict[str, list[tuple[int, int]]],
) -> None:
    """Check a tensor, and add the offset and size of each part to the spans of its file."""
    full = tensor.shape
    if tensor.dtype not in DTYPES or len(full) > _MAX_DIMS:
        raise ValueError(f"{name} has the dtype {tensor.dtype[:80]!r} and {len(full)} dimensions")
    itemsize = tensor.itemsize
    for part in tensor.parts:
        end = tuple(map(operator.add, part.start, part.shape))
        if not len(part.start) == len(part.shape) == len(full) or any(map(operator.gt, end, full)):
            raise ValueError(f"a part of {name}, {part.start} to {end}, is not inside {full}")
        file, size = files.get(part.file), math.prod(part.shape) * itemsize
        if file is None or not file.header <= part.offset <= part.offset + size <= file.size:
            raise ValueError(f"a part of {name} is not inside the file {part.file[:200]!r}")
        if len(part.digests) != -(-size // CHUNK):
            raise ValueError(f"a part of {name} has {len(part.digests)} digests for {size} bytes")
        if size:
            spans[part.file].append((part.offset, size))
    if not is_partition(full, [(part.start, part.shape) for part in tensor.parts]):
        raise ValueError(f"the parts of {name} overlap or do not cover {list(full)}")


def is_partition(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes, each inside a shape, cover every element once.

    They do if they are disjoint and have as many elements as the shape.
    """
    if len(boxes) == 1:
        return math.prod(boxes[0][1]) == math.prod(shape)
    boxes = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    # Compared are boxes that share an index of the dimension with most starts: few, since a tensor
    # is split along it.
    dim = max(range(len(shape)), key=lambda dim: len({start[dim] for start, _ in boxes}))
    nearby: list[Box] = []
    for start, size in sorted(boxes, key=lambda box: box[0][dim]):
        nearby = [(a, n) for a, n in nearby if a[dim] + n[dim] > start[dim]]
        for other, length in nearby:
            sides = zip(start, size, other, length, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in sides):
                return False
        nearby.append((start, size))
    return True
