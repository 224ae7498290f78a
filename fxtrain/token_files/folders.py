"""Sources of several files or groups of documents: datatrove, MDS, Parquet, Arrow, NumPy."""

import functools
import glob
import json
import os
from collections.abc import Callable
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain._reading import open_file, read_text
from fxtrain.errors import DataError
from fxtrain.token_files.maps import (
    FileState,
    MappedTokens,
    check_unchanged,
    damaged,
    ends_digest,
    file_state,
    load_numpy,
    map_token_file,
    mapped_tokens,
    one_error,
    open_megatron,
    open_nanogpt,
)
from fxtrain.token_files.records import (
    ColumnTokens,
    DatatroveTokens,
    MDSTokens,
    MegatronTokens,
    NumPyTokens,
    TokenSource,
)

_INDEX_BYTES = 1 << 30  # of an index of MDS shards, at most
_OPEN_PARTS = 32  # of one process, each with up to two maps
_PATTERNS: dict[type, tuple[str, ...]] = {
    DatatroveTokens: ("*.ds",),
    MDSTokens: ("index.json",),
    NumPyTokens: ("*.npy",),
    ColumnTokens: ("*.parquet", "*.arrow"),
}
_TYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16"}  # of an array in MDS
_TYPES |= {32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}


@attrs.frozen(kw_only=True, eq=False)
class Joined:
    """Parts of a source, one after the other; their maps are opened where they are read."""

    bounds: Any  # int64, the first token of each part; then the number of all
    dtype: Any  # of the tokens that `gather` returns
    part: Callable[[int], MappedTokens]  # number → the maps of a part
    tokens: None = None
    end: None = None

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return int(self.bounds[-1])

    def check(self) -> None:
        """Nothing: each part is checked where it is read."""

    def gather(self, begins: Any, sizes: Any) -> Any:
        """The tokens of several ranges, one after the other."""
        numpy = load_numpy()
        pieces = [numpy.zeros(0, self.dtype)]
        for number, begin, size in self._inside(begins, sizes):
            pieces.append(self.part(number).gather(numpy.array([begin]), numpy.array([size])))
        return numpy.concatenate(pieces, dtype=self.dtype, casting="unsafe")

    def starts(self, begins: Any, length: int) -> tuple[Any, Any]:
        """Where documents start in ranges of tokens; see `MappedTokens.starts`."""
        numpy = load_numpy()
        indices, places = [begins[:0]], [begins[:0]]
        for index, begin in enumerate(begins.tolist()):
            size = min(length, self.size - begin)
            for number, first, count in self._inside([begin], [size]):
                shift = int(self.bounds[number]) + first - begin
                _, starts = self.part(number).starts(numpy.array([first]), count)
                indices.append(numpy.full(len(starts), index))
                places.append(starts + shift)
        return numpy.concatenate(indices), numpy.concatenate(places)

    def _inside(self, begins: Any, sizes: Any) -> Any:
        """(part, first token there, tokens) of ranges, split where parts end."""
        numpy = load_numpy()
        for begin, size in zip(map(int, begins), map(int, sizes), strict=True):
            number = int(numpy.searchsorted(self.bounds, begin, side="right")) - 1
            while size > 0:
                first = begin - int(self.bounds[number])
                count = min(size, int(self.bounds[number + 1]) - begin)
                if count:
                    yield number, first, count
                begin, size, number = begin + count, size - count, number + 1


def source_states(source: TokenSource) -> tuple[FileState, ...]:
    """The files of a source as they are now, in order.

    Raises:
        DataError: one is missing, or there is none.
    """
    path = source.path
    if isinstance(source, MegatronTokens):
        if path.endswith((".bin", ".idx")) and not os.path.exists(f"{path}.idx"):
            raise DataError(
                f"tokens: MegatronTokens takes the path that both files share, found {path}. "
                f"Use path={path[:-4]!r}."
            )
        return file_state(f"{path}.idx"), file_state(f"{path}.bin")
    names = [path]
    if os.path.isdir(path) and (patterns := _PATTERNS.get(type(source))):
        groups = (sorted(glob.glob(os.path.join(glob.escape(path), each))) for each in patterns)
        names = next(filter(None, groups), None)
        if names is None:
            raise damaged(path, f"has no file {' or '.join(patterns)}")
    return tuple(file_state(name) for name in names)


def source_text(source: TokenSource, states: tuple[FileState, ...]) -> str:
    """What the tokens of a source depend on: its settings, and a digest of its files.

    The digest is of their sizes and of their first and last mebibyte, less of each where there are
    many files. Paths and times of change do not count, since copies have others.
    """
    parts = [path for path, _ in _parts(source, states)]
    indexes = [f"{path}.index" for path in parts if isinstance(source, DatatroveTokens)]
    names = dict.fromkeys((*(state[0] for state in states), *parts, *indexes))
    files = [name for name in names if os.path.isfile(name)]
    kept = {name: value for name, value in attrs.asdict(source).items() if name != "path" and value}
    settings = ", ".join(f"{name}={value!r}" for name, value in kept.items())
    return f"{type(source).__name__}({settings}) {ends_digest(files)}"


@functools.lru_cache(maxsize=_OPEN_PARTS)
def open_tokens(source: TokenSource, states: tuple[FileState, ...]) -> MappedTokens | Joined:
    """The tokens of a source; files that have changed are opened again.

    Raises:
        DataError: a file is not what its header says.
    """
    with one_error(source.path):
        return _opened(source, states)


def _opened(source: TokenSource, states: tuple[FileState, ...]) -> MappedTokens | Joined:
    numpy = load_numpy()
    keys = _parts(source, states)
    files = {state[0]: (state,) for state in states}

    def open_part(key: _Key) -> MappedTokens:
        # With the state of its own file, of what may be thousands.
        with one_error(key[0]):
            return _part(source, files.get(key[0], states), key)

    sizes = [_size(source, key, open_part) for key in keys]
    keys = [key for key, size in zip(keys, sizes, strict=True) if size]
    if not keys:
        raise damaged(source.path, "has no tokens")
    first = open_part(keys[0])
    if len(keys) == 1:
        return first
    bounds = numpy.concatenate([[0], numpy.cumsum([size for size in sizes if size])])

    def part(number: int) -> MappedTokens:
        file = open_part(keys[number])
        if file.size != bounds[number + 1] - bounds[number] or file.dtype != first.dtype:
            raise damaged(
                keys[number][0],
                f"has {file.size} tokens of {file.dtype} in part {keys[number][1]}, where "
                f"{bounds[number + 1] - bounds[number]} of {first.dtype} were expected",
            )
        return file

    return Joined(bounds=bounds, dtype=first.dtype, part=part)


# What names a part: a file, and a group of it.
_Key = tuple[str, int]


def _parts(source: TokenSource, states: tuple[FileState, ...]) -> list[_Key]:
    paths = [state[0] for state in states]
    if isinstance(source, MegatronTokens):
        return [(source.path, 0)]
    if isinstance(source, MDSTokens):
        return [(name, number) for number, name in enumerate(_mds_shards(paths[0]))]
    if not isinstance(source, ColumnTokens):
        return [(path, 0) for path in paths]
    return [
        (path, number)
        for path in paths
        for number in range(
            len(_arrow_chunks(path, source.column))
            if path.endswith(".arrow")
            else open_parquet(path).num_row_groups
        )
    ]


def _size(source: TokenSource, key: _Key, open_part: Callable[[_Key], MappedTokens]) -> int:
    """Tokens of a part; of a Parquet file, without reading more than its footer."""
    path, number = key
    if isinstance(source, ColumnTokens) and not path.endswith(".arrow"):
        group = open_parquet(path).metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            statistics = column.statistics
            named = column.path_in_schema.split(".")[0] == source.column
            if named and statistics is not None and statistics.has_null_count:
                return column.num_values - statistics.null_count
    return open_part(key).size


@functools.lru_cache(maxsize=_OPEN_PARTS)
def _part(source: TokenSource, states: tuple[FileState, ...], key: _Key) -> MappedTokens:
    path, number = key
    if isinstance(source, MegatronTokens):
        check_unchanged(states, f"{path}.idx")
        check_unchanged(states, f"{path}.bin")
        return open_megatron(source)
    check_unchanged(states, path)
    if isinstance(source, DatatroveTokens):
        return _datatrove(source, path)
    if isinstance(source, MDSTokens):
        return _mds(source, states[0][0], path, number)
    if isinstance(source, NumPyTokens):
        return _npy(path)
    if isinstance(source, ColumnTokens):
        return _column(source, path, number)
    return open_nanogpt(source)


def _datatrove(source: DatatroveTokens, path: str) -> MappedTokens:
    numpy = load_numpy()
    tokens, data = mapped_tokens(path, source.dtype)
    if os.path.exists(f"{path}.metadata"):
        size = read_text(f"{path}.metadata").partition("\n")[0].strip().rpartition("|")[2]
        if size != str(tokens.itemsize):
            raise damaged(f"{path}.metadata", f"says that tokens have {size[:9]!a} bytes")
    index, file = mapped_tokens(f"{path}.index", "uint64")
    if index[-1] != len(tokens):
        raise damaged(f"{path}.index", f"describes {index[-1]} tokens of {len(tokens)}")
    ends = numpy.asarray(index).view("<i8")
    return MappedTokens(path=f"{path}.index", tokens=tokens, maps=(data, file), ends=ends)


def _npy(path: str) -> MappedTokens:
    numpy = load_numpy()
    whole = map_token_file(path)
    data = whole.data
    try:
        with open_file(path) as file:
            version = numpy.lib.format.read_magic(file)
            read = {
                (1, 0): numpy.lib.format.read_array_header_1_0,
                (2, 0): numpy.lib.format.read_array_header_2_0,
            }[version]
            shape, fortran, dtype = read(file)
            at = file.tell()
    except Exception as error:  # whatever the parser of Python code raises that numpy calls
        raise damaged(path, f"has no header that can be read ({ascii(error)[:200]})") from error
    size = 1
    for dim in shape:
        size *= dim
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (fortran and len(shape) > 1):
        raise damaged(path, f"has an array of {dtype} with shape {shape}, not integers in rows")
    if len(data) != at + size * dtype.itemsize:
        raise damaged(path, f"has {len(data)} bytes; an array of {dtype} {shape} needs others")
    documents = shape[0] if len(shape) == 2 else 1
    ends = (numpy.arange(documents) + 1) * (size // max(1, documents))
    tokens = numpy.frombuffer(data, dtype, size, at)
    return MappedTokens(path=path, tokens=tokens, maps=(whole,), ends=ends)


def _mds_shards(path: str) -> list[str]:
    with one_error(path):
        shards = [str(shard["raw_data"]["basename"]) for shard in _mds_index(path)]
    folder = os.path.dirname(path)
    if any(os.path.basename(name) != name or name in ("", "..") for name in shards):
        raise damaged(path, "names shards outside of its folder")
    return [os.path.join(folder, name) for name in shards]


def _mds_index(path: str) -> list[Any]:
    with one_error(path):
        shards = json.loads(read_text(path, _INDEX_BYTES))["shards"]
        if any(shard["format"] != "mds" for shard in shards):
            raise damaged(path, "has shards that are not MDS")
        if any(shard["compression"] for shard in shards):
            raise damaged(path, "has compressed shards: write them without compression")
        return [shard | {"samples": int(shard["samples"])} for shard in shards]


def _mds(source: MDSTokens, index: str, path: str, number: int) -> MappedTokens:
    """A shard: u4 samples, u4 offsets, a config, and samples with a size per variable column."""
    numpy = load_numpy()
    file = map_token_file(path)
    shard, data = _mds_index(index)[number], file.data
    samples = shard["samples"]
    bytes_ = numpy.frombuffer(data, "u1")
    names, encodings, fixed = (
        shard[f"column_{field}"] for field in ("names", "encodings", "sizes")
    )
    if source.column not in names:
        raise damaged(index, f'has no column "{source.column}" but {names}')
    if len(data) < 8 + 4 * samples or int(numpy.frombuffer(data, "<u4", 1)[0]) != samples:
        raise damaged(path, f"has not the {samples} samples of its index.json")
    offsets = numpy.frombuffer(data, "<u4", samples + 1, 4).astype("i8")
    column = names.index(source.column)
    variable = [size is None for size in fixed]
    head = 4 * sum(variable)
    first, sizes = offsets[:-1], numpy.diff(offsets)
    if len(data) != offsets[-1] or offsets[0] < 8 + 4 * samples or (sizes < head).any():
        raise damaged(path, "has offsets that do not fit its size")
    heads = bytes_[first[:, None] + numpy.arange(head)].copy().view("<u4").astype("i8")
    places = iter(heads.T if head else ())
    columns = [next(places) if size is None else numpy.full(samples, int(size)) for size in fixed]
    if (head + sum(columns) != sizes).any():
        raise damaged(path, "has samples whose columns do not fit their size")
    begins, lengths = first + head + sum(columns[:column], start=0 * first), columns[column]
    begins, lengths, dtype = _mds_arrays(source, path, encodings[column], bytes_, begins, lengths)
    ends = (lengths // dtype.itemsize).cumsum()
    apart = bytes_, begins, dtype
    return MappedTokens(path=path, tokens=None, maps=(file,), apart=apart, ends=ends)


def _mds_arrays(
    source: MDSTokens, path: str, encoding: str, data: Any, begins: Any, sizes: Any
) -> tuple[Any, Any, Any]:
    """Where the tokens of each sample are, without the header of its array."""
    numpy = load_numpy()
    kind, *options = encoding.split(":")
    dtype = options[0] if options else None
    if kind == "bytes":
        dtype = source.dtype
    if kind not in ("ndarray", "bytes") or (kind == "bytes" and dtype is None):
        raise damaged(
            path,
            f'has a column "{source.column}" of {encoding}, where MDSTokens reads ndarray, and '
            f"bytes of a given dtype",
        )

    def skip(count: Any) -> None:
        nonlocal begins, sizes
        if (sizes < count).any():
            raise damaged(path, "has samples that are smaller than the header of their array")
        begins, sizes = begins + count, sizes - count

    if kind == "ndarray" and not options and len(begins):
        codes = set(data[begins].tolist())
        if len(codes) > 1 or not codes <= _TYPES.keys():
            raise damaged(path, f"has arrays of several types, or not of integers: {codes}")
        dtype = _TYPES[codes.pop()]
        skip(1)
    if kind == "ndarray" and len(options) < 2 and len(begins):
        shapes = data[begins].astype("i8")
        skip(1)
        skip((shapes >> 2) * numpy.array([1, 2, 4, 8])[shapes & 3])
    kept = numpy.dtype(dtype or "uint16").newbyteorder("<")
    if kept.kind not in "iu" or (sizes % kept.itemsize).any():
        raise damaged(path, f"has arrays whose bytes are no number of {kept} tokens")
    return begins, sizes, kept


def open_parquet(path: str) -> Any:
    """A Parquet file.

    Raises:
        DataError: it is damaged.
    """
    pyarrow = _arrow()
    parquet: Any = optional("pyarrow.parquet", extra="arrow", needed_by=f"reading {path}")
    try:
        return parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(path, f"is no Parquet file that can be read ({error})") from error


@functools.lru_cache(maxsize=_OPEN_PARTS)
def _arrow_chunks(path: str, column: str) -> list[Any]:
    pyarrow = _arrow()
    try:
        data = pyarrow.memory_map(path)
        try:
            table = pyarrow.ipc.open_file(data).read_all()
        except pyarrow.ArrowInvalid:  # the format of streams, as Hugging Face datasets write it
            table = pyarrow.ipc.open_stream(data).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(path, f"is no Arrow file that can be read ({error})") from error
    if column not in table.column_names:
        raise damaged(path, f'has no column "{column}" but {table.column_names}')
    return table.column(column).chunks


def _column(source: ColumnTokens, path: str, number: int) -> MappedTokens:
    """A row group of a Parquet file, decoded, or a batch of an Arrow file, mapped."""
    pyarrow = _arrow()
    try:
        if path.endswith(".arrow"):
            lists = _arrow_chunks(path, source.column)[number]
        else:
            file = open_parquet(path)
            if source.column not in file.schema_arrow.names:
                raise damaged(
                    path, f'has no column "{source.column}" but {file.schema_arrow.names}'
                )
            table = file.read_row_group(number, columns=[source.column])
            lists = table.column(source.column).combine_chunks()
            if isinstance(lists, pyarrow.ChunkedArray):
                lists = lists.chunk(0)
        lists.validate(full=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(path, f"has a group, {number}, that cannot be read ({error})") from error
    if not hasattr(lists, "flatten") or not pyarrow.types.is_integer(lists.type.value_type):
        raise damaged(
            path, f'has a column "{source.column}" of {lists.type}, not lists of integers'
        )
    values = lists.flatten()  # without the lists that are null
    if values.null_count:
        raise damaged(path, f'has nulls among the tokens of "{source.column}"')
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    tokens = values.to_numpy(zero_copy_only=False)
    maps = (map_token_file(path),) if path.endswith(".arrow") else ()
    return MappedTokens(path=path, tokens=tokens, maps=maps, ends=lengths.astype("i8").cumsum())


def _arrow() -> Any:
    return optional("pyarrow", extra="arrow", needed_by="fx.data.ColumnTokens")
