"""The manifest: the contents of a checkpoint, their location, and digests to verify them.

The file is one line of JSON, `{"digest":"…","manifest":{…}}`. The digest covers the bytes of the
inner object, so that a change of any byte of the file is detected.
"""

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

import attrs
import cattrs
import xxhash

from fxtrain.checkpoint.folder_lock import Process, process_of
from fxtrain.checkpoint.storage import MANIFEST
from fxtrain.errors import CheckpointError
from fxtrain.ops.tensor_bytes import DTYPES
from fxtrain.state import Key, Position
from fxtrain.state.keys import decode_key
from fxtrain.state.parsing import parse_json

FORMAT = 1
CHUNK = 4 << 20  # bytes of a stored box that share a digest; reads verify complete chunks
_MAX_DIMS = 64  # torch's limit
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")
_HEAD, _MIDDLE, _TAIL = b'{"digest":"', b'","manifest":', b"}\n"
# Of the inner object, what a list of checkpoints needs: what is between grows with the model.
_SUMMARY = re.compile(rb'(.*?),"models":.*(,"files":.*)', re.DOTALL)
_NO_DETAILS = b',"models":{},"extra":null,"tensors":{},"aliases":{},"own":[]'

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
    def saver(self) -> Process | None:
        """The process that committed it, if recorded."""
        owner = self.topology.get("saver")
        return None if owner is None else process_of(owner)

    def keys_of(self, model: str) -> dict[Key, str]:
        """The keys of a model's tensors and aliases, each with its name in this manifest."""
        decoded = [(name, decode_key(name)) for name in (*self.tensors, *self.aliases)]
        return {key: name for name, (owner, key) in decoded if owner == model}


class PackedTensors(Mapping[str, StoredTensor]):
    """The tensors of a manifest that another rank has read, as it sends them.

    The parts of a tensor are bytes until it is read: a thousand ranks may store half a million.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self.kinds = kinds_of(tensors)
        self._parts = {
            name: json.dumps([[*_fields(part).values()] for part in tensor.parts]).encode()
            for name, tensor in tensors.items()
        }

    def __getitem__(self, name: str) -> StoredTensor:
        dtype, shape = self.kinds[name]
        parts = tuple(
            StoredBox(
                file=file,
                offset=offset,
                start=tuple(start),
                shape=tuple(size),
                digests=tuple(digests),
            )
            for file, offset, start, size, digests in json.loads(self._parts[name])
        )
        return StoredTensor(dtype=dtype, shape=shape, parts=parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


def kinds_of(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and the shape of each tensor of a manifest, by name."""
    if isinstance(tensors, PackedTensors):
        return tensors.kinds
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def packed(manifest: Manifest) -> Manifest:
    """A manifest that other ranks of this run can read quickly."""
    own = tuple([PackedTensors(of_rank) for of_rank in manifest.own])
    return attrs.evolve(manifest, tensors=PackedTensors(manifest.tensors), own=own)


digest_of = xxhash.xxh3_128_hexdigest  # the digest of some bytes


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file."""
    data = {"format": FORMAT, **_fields(manifest)}
    options: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False, "default": _fields}
    body = json.dumps(data, **options).encode()
    return _HEAD + digest_of(body).encode() + _MIDDLE + body + _TAIL


def _fields(record: Any) -> dict[str, Any]:
    """The fields of a record by name; a large run has half a million of them."""
    names, read = _fields_of(type(record))
    return dict(zip(names, read(record), strict=True))


@functools.cache
def _fields_of(kind: type) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """The names of a record's fields, and what reads them; each record here has several."""
    if not attrs.has(kind):
        raise TypeError(f"a manifest cannot contain a {kind.__name__}")
    names = [*attrs.fields_dict(kind)]
    return names, operator.attrgetter(*names)


def load_manifest(raw: bytes, *, summary: bool = False) -> Manifest:
    """Parse the bytes of the file, and validate every field.

    Args:
        summary: Leave out models, extra and tensors, which take long to parse.

    Raises:
        CheckpointError: a byte has changed, or the manifest is inconsistent. Raised before
            anything is opened or allocated from its content.
        NewerFormatError: this version does not know its format.
    """
    body = bytes(_body(raw))
    match = _SUMMARY.fullmatch(body) if summary else None
    try:
        data = parse_json(match[1] + _NO_DETAILS + match[2] if match else body)
        # The format comes first: the other fields of a newer format are unknown.
        number = data.pop("format")
        if type(number) is int and number > FORMAT:
            raise NewerFormatError(
                f"It was written by a newer fxtrain (format {str(number)[:80]}; this version reads "
                f"{FORMAT}). Update fxtrain, or use a checkpoint that this version wrote."
            )
        if type(number) is not int or number != FORMAT:
            raise ValueError(f"its format is {str(number)[:80]!r}")
        manifest = _converter().structure(data, Manifest)
        _check(manifest)
        if not match:
            _check_tensors(manifest)
    except NewerFormatError:
        raise
    except Exception as error:  # whatever a missing field or one of another type raises
        problem = f"{type(error).__name__}: {str(error)[:500]}".rstrip(".")
        raise CheckpointError(f"The manifest is malformed: {problem}.", code="FX602") from None
    return manifest


@functools.cache
def _converter() -> cattrs.Converter:
    """Takes numbers as they are, tuples from lists of one type, and no fields but the records'."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    for kind in (bool, int):
        converter.register_structure_hook(kind, _exact)
    converter.register_structure_hook_factory(
        lambda kind: get_origin(kind) is tuple and get_args(kind)[0] in (int, str), _exactly_all
    )
    converter.register_structure_hook(float, lambda value, _: _exact(value, int | float))
    return converter


def _exact(value: Any, kind: Any) -> Any:
    if type(value) not in (get_args(kind) or (kind,)):
        raise TypeError(f"{str(value)[:80]!r} is not of type {kind}")
    return value


def _exactly_all(kind: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    """A function that takes a list of one type, and gives the tuple of this kind."""
    element = get_args(kind)[0]

    def structure(values: Any, _: Any) -> tuple[Any, ...]:
        if type(values) is not list or not {*map(type, values)} <= {element}:
            raise TypeError(f"{str(values)[:80]!r} is not of type {kind}")
        return tuple(values)

    return structure


def _body(raw: bytes) -> memoryview:
    """The inner object of the file, as it was written."""
    view, middle = memoryview(raw), len(_HEAD) + 32
    begin = middle + len(_MIDDLE)
    framed = view[: len(_HEAD)], view[middle:begin], view[-len(_TAIL) :]
    body, recorded = view[begin : -len(_TAIL)], view[len(_HEAD) : middle]
    if framed != (_HEAD, _MIDDLE, _TAIL) or recorded != digest_of(body).encode():
        raise CheckpointError(
            f"{MANIFEST} ({len(raw)} bytes) is not a manifest, or was truncated or changed: its "
            f"digest does not match.",
            code="FX602",
        )
    return body


def _check(manifest: Manifest) -> None:
    """Raise a ValueError if fields of a summary contradict each other."""
    _exact(manifest.order, int)
    _ = manifest.saver  # raises if it does not describe a process
    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or not 8 <= file.header <= file.size:
            raise ValueError(f"{name[:200]!r} is not the name of a data file of {file.size} bytes")


def _check_tensors(manifest: Manifest) -> None:
    """Check that parts are inside their files, do not overlap, and cover their tensors."""
    ranks = manifest.topology["world_size"]
    if type(ranks) is not int or not ranks or ranks != len(manifest.own):
        raise ValueError(f"{str(ranks)[:80]} ranks, with states of {len(manifest.own)}")
    for name, target in manifest.aliases.items():
        if target not in manifest.tensors or name in manifest.tensors:
            raise ValueError(f"{name!r} is not a valid alias of the tensor {target!r}")
    used = {name: [(0, file.header)] for name, file in manifest.files.items()}
    for table in (manifest.tensors, *manifest.own):
        for name, tensor in table.items():
            _check_tensor(name, tensor, used)
    for name, spans in used.items():  # every byte belongs to the header or to one tensor
        end = 0
        for offset, size in (*sorted(spans), (manifest.files[name].size, 0)):
            if offset != end:
                raise ValueError(f"parts in {name} overlap or have a gap at byte {end}")
            end += size


def _check_tensor(
    name: str, tensor: StoredTensor, used: Mapping[str, list[tuple[int, int]]]
) -> None:
    """Check a tensor; the offset and size of each part are added to those used in its file."""
    itemsize = DTYPES[tensor.dtype].itemsize
    for part in tensor.parts:
        size = math.prod(part.shape) * itemsize
        if len(part.digests) != -(-size // CHUNK):
            raise ValueError(f"a part of {name} needs a digest for each {CHUNK} of {size} bytes")
        if size:
            used[part.file].append((part.offset, size))
    boxes = map(operator.attrgetter("start", "shape"), tensor.parts)
    if len(tensor.shape) > _MAX_DIMS or not covers(tensor.shape, boxes):
        raise ValueError(f"the parts of {name} overlap or do not cover {list(tensor.shape)}")


def covers(shape: tuple[int, ...], boxes: Iterable[Box]) -> bool:
    """Whether boxes lie inside a shape and have as many elements as it has.

    Writers never write an element twice, so that such boxes cover all of them.
    """
    elements = 0
    for start, part in boxes:
        for at, length, size in zip(start, part, shape, strict=True):
            if not 0 <= at <= at + length <= size:
                return False
        elements += math.prod(part)
    return elements == math.prod(shape)
