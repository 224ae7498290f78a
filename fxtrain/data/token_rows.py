"""Rows of a fixed length, cut from files of tokens that stay on disk."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fxtrain._optional import optional
from fxtrain.data.blends import BlendOrder
from fxtrain.data.fetch import collate_nothing
from fxtrain.data.sharded_loader import Sharded
from fxtrain.data.sharding import shard
from fxtrain.data.token_maps import FileState, file_states, opened
from fxtrain.errors import DataError
from fxtrain.state import DistContext, Plan
from fxtrain.state.token_files import Blend, TokenSource

_NO_LABEL = -100  # `ignore_index` of torch's cross-entropy


def tokens(
    source: TokenSource | Blend,
    ctx: DistContext,
    plan: Plan | None = None,
    *,
    length: int,
    batch_size: int,
    shuffle: bool = True,
    documents: bool = False,
    workers: int = 0,
) -> Sharded[dict[str, Tensor]]:
    """Split rows of tokens over the ranks.

    The documents of the source are concatenated and cut into rows of `length` tokens. Rows are
    computed from their number: there is no cache and no build, and a start or a resume at any row
    reads the header and a few entries of the index. Order, ranks and cursor are those of
    `fx.shard`.

    Args:
        source: Where the tokens are; mapped into memory, not read whole. Or a blend of sources,
            which needs `loader.state()` beside the position to be resumed, as `fx.fit` saves it.
        ctx: The ranks, as in `fx.shard`.
        plan: As in `fx.shard`.
        length: Tokens of a row.
        batch_size: Rows of a batch, per rank or of all ranks, as the plan says.
        shuffle: Permute the rows, by the seed of the plan and the epoch.
        documents: Keep documents apart: labels end at their ends, and a batch also has
            `positions` and `documents`. By default, as in the training of Megatron and nanoGPT,
            the last token of a document predicts the first of the next one.
        workers: Processes that read, as `num_workers` of a DataLoader. They cost more than a
            batch of tokens in memory; use them where reads of the disk take long.

    Returns:
        A loader like that of `fx.shard`. `batch.data` has int64 tensors of shape
        `(rows, length)`: `tokens`, and `labels`, the token after each of them or -100 where there
        is none. With `documents`, also int64 `positions`, which restart with every document and
        row, and int32 `documents`, the number of the document in its row, from 0. After the last
        token of the source, the last row is padded: `tokens` and `positions` are 0, `labels` -100
        and `documents` -1. Of a blend, also int64 `source`, of shape `(rows,)`: the number of the
        part that gave the row.

    Effects:
        Maps the files, and those of `fx.shard`.

    Raises:
        DataError: a file is missing or empty, or its header and its size disagree; or those of
            `fx.shard`.
        MissingPackageError: numpy is not installed.

    Example:
        >>> import array, fxtrain as fx, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, fx.detect(env={}, device="cpu") as ctx:
        ...     path = pathlib.Path(folder, "train.bin")
        ...     _ = path.write_bytes(array.array("H", [5, 6, 0, 7, 8, 9, 0]).tobytes())
        ...     source = fx.data.NanoGPTTokens(path=str(path), end=0)
        ...     for batch in fx.tokens(source, ctx, length=4, batch_size=1, shuffle=False):
        ...         batch.data["tokens"].tolist(), batch.data["labels"].tolist()
        ...     loader = fx.tokens(source, ctx, length=7, batch_size=1, documents=True)
        ...     [batch.data["labels"].tolist() for batch in loader]
        ([[5, 6, 0, 7]], [[6, 0, 7, 8]])
        ([[8, 9, 0, 0]], [[9, 0, -100, -100]])
        [[[6, 0, -100, 8, 9, 0, -100]]]
    """
    if not isinstance(source, TokenSource | Blend):
        raise DataError(
            f"tokens: source is a {type(source).__name__}. Pass fx.data.MegatronTokens(path=...), "
            f"another source of fx.data, or an fx.data.Blend."
        )
    for name, value, least in (
        ("length", length, 1),
        ("batch_size", batch_size, 1),
        ("workers", workers, 0),
    ):
        if type(value) is not int or value < least:
            raise DataError(f"tokens({name}={value!r}): pass a number, {least} or more.")
    blend = source if isinstance(source, Blend) else None
    sources = [part.source for part in source.parts] if isinstance(source, Blend) else [source]
    parts = tuple(
        _Rows(source=part, length=length, states=file_states(part), separate=documents)
        for part in sources
    )
    order: dict[str, Any] = {"shuffle": shuffle}
    if blend is not None:
        order = {"sampler": BlendOrder(blend, [len(rows) for rows in parts], shuffle=shuffle)}
    loader = DataLoader(
        parts[0] if blend is None else _BlendRows(parts),
        batch_size=batch_size,
        num_workers=workers,
        collate_fn=collate_nothing,
        **order,
    )
    return shard(loader, ctx, plan)


class _BlendRows(Dataset[dict[str, Tensor]]):
    """Rows of several sources, numbered one source after the other."""

    def __init__(self, parts: "tuple[_Rows, ...]") -> None:
        self._parts = parts
        self._starts = list(itertools.accumulate((len(rows) for rows in parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitems__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """A batch: one read of each source that has rows in it."""
        sources = [bisect.bisect_right(self._starts, row) - 1 for row in rows]
        batch: dict[str, Tensor] = {}
        for source in set(sources):
            here = [at for at, other in enumerate(sources) if other == source]
            found = self._parts[source].__getitems__(
                [rows[at] - self._starts[source] for at in here]
            )
            for name, values in found.items():
                if name not in batch:
                    batch[name] = values.new_empty((len(rows), *values.shape[1:]))
                batch[name][here] = values
        return {**batch, "source": torch.tensor(sources, device="cpu")}


@attrs.frozen(kw_only=True, eq=False)
class _Rows(Dataset[dict[str, Tensor]]):
    """Rows of a source; pickled without its maps, which each process opens."""

    source: TokenSource
    length: int
    states: tuple[FileState, ...]
    separate: bool

    def __len__(self) -> int:
        return -(-len(opened(self.source, self.states).tokens) // self.length)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([row]).items()}

    def __getitems__(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """A batch at once: one gather, and arithmetic over whole batches."""
        numpy: Any = optional("numpy", extra="tokens", needed_by="fx.tokens")
        file, length = opened(self.source, self.states), self.length
        numbers = numpy.array(rows, "i8")
        # Rows that have a token after their last one; only the row after them may be padded.
        whole = (len(file.tokens) - 1) // length
        step = file.tokens.itemsize
        table = numpy.lib.stride_tricks.as_strided(
            file.tokens, (whole, length + 1), (length * step, step), writeable=False
        )
        if len(rows) and max(rows) < whole:
            found, short, size = table[numbers], (), length
        else:
            found = numpy.zeros((len(rows), length + 1), file.tokens.dtype)
            inside = numbers < whole
            found[inside] = table[numbers[inside]]
            rest = file.tokens[whole * length :]
            short, size = ~inside, len(rest)
            found[short, :size] = rest
        values, labels = found[:, :-1].astype("i8"), found[:, 1:].astype("i8")
        batch = {"tokens": values, "labels": labels}
        if self.separate:
            first = numpy.zeros(found.shape, bool)  # where a document starts
            if file.bounds is not None:
                first[file.starts(numbers * length, length + 1)] = True
            elif file.end is not None:
                numpy.equal(found[:, :-1], file.end, out=first[:, 1:])
            labels[first[:, 1:]] = _NO_LABEL
            first = first[:, :-1]
            first[:, 0] = False
            at = numpy.arange(length)
            batch["positions"] = at - numpy.maximum.accumulate(at * first, axis=1)
            batch["documents"] = first.cumsum(1, dtype="i4")
        if len(short):
            labels[short, size - 1 :] = _NO_LABEL
            for name, padding in (("positions", 0), ("documents", -1)):
                if name in batch:
                    batch[name][short, size:] = padding
        return {name: torch.from_numpy(value) for name, value in batch.items()}
