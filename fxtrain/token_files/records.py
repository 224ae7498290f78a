"""Files of tokens, as other libraries write them, and blends of them. Data only."""

from itertools import pairwise
from typing import Literal

import attrs

from fxtrain._record import at_least, record
from fxtrain.errors import PlanError

# A weight, or a schedule: points of (update, weight).
Weight = float | tuple[tuple[int, float], ...]


@record
class MegatronTokens:
    """Tokens in Megatron's indexed files, `PATH.bin` and `PATH.idx`.

    Attributes:
        path: The path that both files share, without `.bin` and `.idx`.
    """

    path: str


@record
class NanoGPTTokens:
    """Tokens in a file without a header, as nanoGPT writes them, in little-endian order.

    Attributes:
        path: The file.
        dtype: Type of a token in the file.
        end: The token that ends a document and belongs to it; without it, documents cannot be
            kept apart.
    """

    path: str
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    end: int | None = attrs.field(default=None, validator=at_least(0))

    def __attrs_post_init__(self) -> None:
        bits = int(self.dtype.lstrip("uint")) - (self.dtype[0] == "i")
        if self.end is not None and self.end >= 1 << bits:
            raise PlanError(
                f"NanoGPTTokens(end={self.end}): a token of {self.dtype} is at most "
                f"{(1 << bits) - 1}. Choose another end, or the dtype of the file."
            )


@record
class DatatroveTokens:
    """Tokens as datatrove's tokenizer writes them: `.ds` files with their `.ds.index`.

    Attributes:
        path: A `.ds` file, or a folder of them, read in the order of their names.
        dtype: Type of a token; compared with `.ds.metadata` where that exists.
    """

    path: str
    dtype: Literal["uint16", "uint32"] = "uint16"


@record
class MDSTokens:
    """Tokens in a column of MDS shards, as MosaicML's streaming writes them, uncompressed.

    Attributes:
        path: The folder of the shards and their `index.json`.
        column: The column: arrays of integers (`ndarray`, `ndarray:uint16`, ...) or `bytes`. Each
            sample is a document.
        dtype: Type of a token in a column of `bytes`.
    """

    path: str
    column: str = "tokens"
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None


@record
class ColumnTokens:
    """Tokens in a column of lists of Parquet files, or of Arrow files as `datasets` writes them.

    Needs pyarrow. Arrow files are mapped; of Parquet files, whole row groups are decoded.

    Attributes:
        path: A `.parquet` or `.arrow` file, or a folder of either, read in the order of their
            names.
        column: The column; each list is a document.
    """

    path: str
    column: str = "input_ids"


@record
class NumPyTokens:
    """Tokens in a folder of `.npy` files of integers.

    Attributes:
        path: A file, or a folder of them, read in the order of their names. An array of one
            dimension is a document; of two, each of its rows is.
    """

    path: str


TokenSource = (
    MegatronTokens | NanoGPTTokens | DatatroveTokens | MDSTokens | ColumnTokens | NumPyTokens
)


@record
class BestFit:
    """Packing of documents that cuts as few as possible.

    Documents are packed in windows of consecutive tokens, each into a fixed number of rows.
    Documents longer than a row are split into whole rows and a rest; then each document goes into
    the row with the least room that is enough. Only those that find no room are cut, to fill the
    room that is left, so that there are no more rows than without packing.

    Attributes:
        window_rows: Rows of a window. A larger one cuts fewer documents and takes longer to plan.
        shuffle_windows: Windows whose rows are mixed in a shuffled epoch, and which are planned at
            the same time.
    """

    window_rows: int = attrs.field(default=4096, validator=at_least(1))
    shuffle_windows: int = attrs.field(default=16, validator=at_least(1, 1024))


@record
class MegatronOrder:
    """The samples of Megatron-core 0.16 (`GPTDataset`), in the order of its training.

    The seed of the plan takes the place of Megatron's `--seed`, which is 1234 by default.

    Attributes:
        samples: Of the whole run, as `--train-samples`, or updates times the global batch. It
            decides how epochs are shuffled. None is one epoch; a blend needs a number.
        split: Weights of the parts of the sequences for training, validation and test, as
            `--split`.
        part: Which of them to read.
    """

    samples: int | None = attrs.field(default=None, validator=at_least(1))
    split: tuple[float, ...] = (1.0,)
    part: Literal["train", "valid", "test"] = "train"

    def __attrs_post_init__(self) -> None:
        if not 0 < len(self.split) <= 3 or min(self.split) < 0 or not sum(self.split):
            raise PlanError(
                f"MegatronOrder(split={self.split!r}): pass one to three weights of at least 0, "
                f"such as (969, 30, 1)."
            )


@record
class BlendPart:
    """A source of a blend.

    Attributes:
        name: Under which checkpoints keep the cursor of this source.
        source: Where its tokens are.
        weight: Its share of the rows, relative to the weights of the other parts. Or a schedule,
            points of (update, weight): linear between them, constant before and after.
    """

    name: str
    source: TokenSource
    weight: Weight = 1.0

    def __attrs_post_init__(self) -> None:
        points = _points(self.weight)
        updates = [update for update, _ in points]
        if not points or any(b <= a for a, b in pairwise(updates)) or updates[0] < 0:
            raise PlanError(
                f"BlendPart(weight={self.weight!r}): pass a number, or points of (update, weight) "
                f"whose updates grow from 0 or more."
            )
        if any(weight < 0 for _, weight in points):
            raise PlanError(
                f"BlendPart(weight={self.weight!r}): a weight is negative. Choose weights of at "
                f"least 0."
            )


@record
class Blend:
    """Several sources, of which each gives a share of the rows.

    Attributes:
        parts: The sources with their weights.
        ends: What follows the last row of a source: "repeat" reads it again in another order;
            "stop" ends the epoch of the blend; "error" raises a DataError.

    Example:
        >>> import fxtrain as fx
        >>> web = fx.data.BlendPart(name="web", source=fx.data.MegatronTokens(path="web"), weight=3)
        >>> code = fx.data.BlendPart(name="code", source=fx.data.MegatronTokens(path="code"))
        >>> fx.data.Blend(parts=(web, code)).ends
        'repeat'
    """

    parts: tuple[BlendPart, ...]
    ends: Literal["repeat", "stop", "error"] = "repeat"

    def __attrs_post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise PlanError(
                f"Blend(parts=...): the parts have the names {names}. Pass one part or more, each "
                f"with a name of its own."
            )
        # Between two points the weights are linear, so that their sum is 0 only if it is at both.
        for update in {0, *(point[0] for part in self.parts for point in _points(part.weight))}:
            if not any(weight_at(part.weight, update) for part in self.parts):
                raise PlanError(
                    f"Blend(parts=...): all weights are 0 at update {update}. Give one source a "
                    f"weight above 0."
                )


def weight_at(weight: Weight, update: int) -> float:
    """A weight at an update of the run, counted from 0."""
    points = _points(weight)
    if update <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if update < high:
            return before + (after - before) * (update - low) / (high - low)
    return points[-1][1]


def constant_from(blend: Blend) -> int:
    """The update from which the weights of a blend do not change."""
    return max(_points(part.weight)[-1][0] for part in blend.parts)


def _points(weight: Weight) -> tuple[tuple[int, float], ...]:
    return weight if isinstance(weight, tuple) else ((0, weight),)
