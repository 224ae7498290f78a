"""Rows of a fixed length, cut from files of tokens that stay on disk."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fxtrain._optional import optional
from fxtrain.data.fetch import collate_nothing
from fxtrain.data.sharded_loader import Sharded
from fxtrain.data.sharding import shard
from fxtrain.data.token_maps import FileState, file_states, opened
from fxtrain.errors import DataError
from fxtrain.state import DistContext, Plan
from fxtrain.state.token_files import MegatronTokens, NanoGPTTokens

_NO_LABEL = -100  # `ignore_index` of torch's cross-entropy


def tokens(
    source: MegatronTokens | NanoGPTTokens,
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
        source: Where the tokens are; mapped into memory, not read whole.
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
        and `documents` -1.

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
    if not isinstance(source, MegatronTokens | NanoGPTTokens):
        raise DataError(
            f"tokens: source is a {type(source).__name__}. Pass fx.data.MegatronTokens(path=...) "
            f"or fx.data.NanoGPTTokens(path=...)."
        )
    for name, value, least in (
        ("length", length, 1),
        ("batch_size", batch_size, 1),
        ("workers", workers, 0),
    ):
        if type(value) is not int or value < least:
            raise DataError(f"tokens({name}={value!r}): pass a number, {least} or more.")
    rows = _Rows(source=source, length=length, states=file_states(source), separate=documents)
    loader = DataLoader(
        rows,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=workers,
        collate_fn=collate_nothing,
    )
    return shard(loader, ctx, plan)


@attrs.frozen(kw_only=True, eq=False)
class _Rows(Dataset[dict[str, Tensor]]):
    """Rows of a source; pickled without its maps, which each process opens."""

    source: MegatronTokens | NanoGPTTokens
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
