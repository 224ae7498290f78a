"""Strategy configs and parts of them: how a plan distributes a model and its data. Data only."""

import re
from collections.abc import Callable
from typing import Any, Literal, cast

import attrs

from fxtrain._record import OF_MODEL, above, at_least, at_least_and_below, record
from fxtrain.errors import PlanError
from fxtrain.state.position import Position

_PATH = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")


@record
class PowerSGD:
    """Low-rank compression of gradients, with the options of torch's PowerSGDState.

    Attributes:
        rank: Rank of the approximation.
        start_iter: Plain all-reduces before compression starts; at least 2.
        min_compression_rate: Compress a tensor only if it shrinks at least by this factor.
        use_error_feedback: Carry what compression lost into the next update.
        warm_start: Start from the last update's factors.
        orthogonalization_epsilon: Added during orthogonalization, against division by zero.
        compression_stats_logging_frequency: Updates between log lines about the ratio.
        batch_tensors_with_same_shape: Compress equal shapes together.
        seed: Seed of the random start, the same on every rank.
    """

    rank: int = attrs.field(default=1, validator=at_least(1))
    start_iter: int = attrs.field(default=1_000, validator=at_least(2))
    min_compression_rate: float = attrs.field(default=2.0, validator=above(0))
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: float = attrs.field(default=0.0, validator=at_least(0))
    compression_stats_logging_frequency: int = attrs.field(default=10_000, validator=at_least(1))
    batch_tensors_with_same_shape: bool = False
    seed: int = 0


@record
class CommHook:
    """How DDP sends gradients.

    Attributes:
        name: none: all-reduce in the gradients' own dtype; fp16 or bf16: compress the
            all-reduce to that dtype; power_sgd or batched_power_sgd: low-rank compression.
        wrapper: Additionally cast what the hook sends to fp16 or bf16.
        power_sgd: Options of the two PowerSGD hooks.
    """

    name: Literal["none", "fp16", "bf16", "power_sgd", "batched_power_sgd"] = "none"
    wrapper: Literal["none", "fp16", "bf16"] = "none"
    power_sgd: PowerSGD = PowerSGD()


@record
class Single:
    """One rank, one device, no communication."""

    kind: Literal["single"] = attrs.field(default="single", init=False)


@record
class DDP:
    """A replica of the model on every rank; gradients are averaged during backward.

    At one rank this is the plain model.

    Attributes:
        bucket_mib: Size of a gradient bucket in MiB.
        bucket_view: Gradients are views into the buckets, which saves a copy of them.
        static_graph: The graph is the same in every update.
        unused_parameters: Search for parameters that the loss does not use.
        sync_buffers: Broadcast buffers (BatchNorm statistics) from rank 0 at the end of each
            backward that reduces gradients.
        hook: How gradients are sent.
        shard_optimizer: Each rank keeps the optimizer states of some parameters only, updates
            those and sends them to the others (ZeRO-1), by torch's ZeroRedundancyOptimizer.
    """

    kind: Literal["ddp"] = attrs.field(default="ddp", init=False)
    bucket_mib: float = attrs.field(default=25.0, validator=above(0))
    bucket_view: bool = True
    static_graph: bool = False
    unused_parameters: bool = False
    sync_buffers: bool = True
    hook: CommHook = CommHook()
    shard_optimizer: bool = False


@record
class XLA:
    """torch_xla: each step becomes one graph, compiled for a TPU or another PJRT device.

    A process with several devices runs one program over all of them (SPMD): rows are split
    over the mesh's axes replicate and shard, parameters over shard. Where each device has a
    process, each holds a replica.

    Attributes:
        blocks: Class names of repeated blocks, after which sharded programs are split; by
            default the model's own list, or the elements of its ModuleLists.
        downcast: Store the model in bf16, rather than computing in bf16 over fp32 parameters.
    """

    kind: Literal["xla"] = attrs.field(default="xla", init=False)
    blocks: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    downcast: bool = False


@record
class Style:
    """How to split the modules whose names match a pattern over the tensor axis.

    Attributes:
        modules: Pattern of module names, such as `layers.*.mlp.up_proj`.
        style: colwise: a linear layer computes its part of the outputs, which are not gathered;
            colwise_gather: they are gathered; rowwise: a linear layer takes such parts, or an
            embedding has a part of the vocabulary, and outputs are summed; reduce: parameters are
            not split, and each rank's gradient is a part of a sum, as for a norm over heads;
            expert: a mixture of experts, with `num_experts` and their stacked weights, gives each
            rank whole experts. Its forward takes tokens (T, D), the experts of each (T, K) and
            their weights (T, K); `num_experts` as an expert means none.
    """

    modules: str
    style: Literal["colwise", "colwise_gather", "rowwise", "reduce", "expert"]


@record
class TP:
    """Layers split over the ranks of the mesh's tensor axis, by torch's DTensor.

    Attributes:
        styles: How to split which modules. Empty uses the plan of a transformers model, or one
            for layers named as in Llama or GPT-2.
        sequence: Between the first block and the last, split activations outside split layers
            along the sequence (dimension 1), which divides their memory as well.
        loss: Keep logits of `colwise_gather` modules sharded, and compute cross-entropy on the
            shards: the loss function gets a DTensor and uses only `cross_entropy` on it.
    """

    styles: tuple[Style, ...] = attrs.field(default=(), metadata=OF_MODEL)
    sequence: bool = False
    loss: bool = False


def _path_of(value: str | Callable[..., bool] | None) -> str | None:
    """The path of a function, if it has one; any other value unchanged."""
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    return path if callable(value) and _PATH.fullmatch(path) else cast(str | None, value)


def _is_path(_: Any, __: Any, value: str) -> None:
    if not _PATH.fullmatch(value):
        raise ValueError("choose a path such as 'package.module:function'.")


@record
class FSDP:
    """Parameters, gradients and optimizer states sharded over ranks: torch's FSDP2.

    At one data rank this is the plain model.

    Attributes:
        mode: full: parameters are gathered block by block, and freed after forward and again
            after backward (ZeRO-3); grads_and_optimizer: parameters stay gathered between
            forward and backward (ZeRO-2); none: nothing is sharded, one replica per rank (as DDP).
        shard: Ranks over which one replica is sharded; the other data ranks hold further
            replicas (hybrid sharding). None uses the mesh's shard axis, or all data ranks if that
            is 1.
        wrap: Class names of the blocks to gather one by one. Empty uses the model's own list
            (`_no_split_modules` of transformers), or else the elements of its ModuleLists.
        min_params: Instead of class names: gather modules with at least this many parameters.
        wrap_by: Instead of those: a function of a module's name and the module that returns
            whether to gather it separately. The plan stores its path, `package.module:function`.
        ignore: Patterns (`embed.*`) of names of parameters that are not sharded.
        param_dtype: Dtype in which parameters are gathered and used; plan is the plan's
            precision.
        reduce_dtype: Dtype in which gradients are summed, if the plan's precision is not fp32.
        cast_inputs: Cast floating-point inputs of blocks to the dtype of their parameters.
        offload: Keep parameters, gradients and optimizer states in host memory.
        pin: Pin that memory, for faster copies.
        forward_prefetch: Blocks to gather ahead in forward; 0 leaves it to torch.
        backward_prefetch: Blocks to gather ahead in backward; 0 leaves it to torch.
        unused_parameters: Ranks may skip different parameters of a block, which count as zero.
            All ranks must run the same blocks.
        tensor: How to split layers over the mesh's tensor axis, in addition to the data axes.
        expert: Ranks of a replica over which the experts of each mixture are spread: tokens travel
            to the ranks of their experts. The rest is sharded over all ranks of the replica.
    """

    kind: Literal["fsdp"] = attrs.field(default="fsdp", init=False)
    mode: Literal["full", "grads_and_optimizer", "none"] = "full"
    shard: int | None = attrs.field(default=None, validator=at_least(1))
    wrap: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    min_params: int | None = attrs.field(default=None, validator=at_least(1), metadata=OF_MODEL)
    wrap_by: str | None = attrs.field(
        default=None,
        converter=_path_of,
        validator=_is_path,
        metadata={
            "choose": "a function at the top of a module, or 'package.module:function'",
            **OF_MODEL,
        },
    )
    ignore: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    param_dtype: Literal["plan", "fp32", "bf16", "fp16"] = "plan"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    cast_inputs: bool = True
    offload: bool = False
    pin: bool = True
    forward_prefetch: int = attrs.field(default=0, validator=at_least(0))
    backward_prefetch: int = attrs.field(default=0, validator=at_least(0))
    unused_parameters: bool = False
    tensor: TP | None = None
    expert: int | None = attrs.field(default=None, validator=at_least(2))


@record
class PP:
    """Consecutive parts of the model on consecutive ranks: torch's pipeline schedules.

    The ranks of the mesh's pipeline axis read the same rows, and each runs some stages of the
    model; those of the data axes hold replicas or shards, whose gradients are averaged. At one
    rank this is the plain model.

    Attributes:
        schedule: Order of the forward and backward passes of micro-batches: gpipe, 1f1b, with
            one stage per rank; looped_bfs, interleaved_1f1b, interleaved_zero_bubble, with several
            in a loop over the ranks; zbv_zero_bubble and dualpipe_v, with two, there and back.
        microbatches: Micro-batches into which each rank's batch is split; None is one per stage.
        split: Names of the modules with which the second and later stages begin, in the order
            in which they run. Empty splits at the model's blocks, into stages with similar
            numbers of parameters.
        stages_per_rank: Stages that a rank runs; None is 1, or 2 if the schedule has several.
        shared: Patterns (`head.*`) of names of parameters that every stage holds, with summed
            gradients; for those that run in another order than they are registered in.
        stages: How each stage is held on the other axes: sharded over the data axes and, with
            `tensor` in it, split over the tensor axis. None holds replicas.
        outputs: Whether a forward without gradients returns the outputs on every rank, or only
            on the rank of the last stage, and None on the others.
    """

    kind: Literal["pp"] = attrs.field(default="pp", init=False)
    schedule: Literal[
        "gpipe",
        "1f1b",
        "looped_bfs",
        "interleaved_1f1b",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipe_v",
    ] = "1f1b"
    microbatches: int | None = attrs.field(default=None, validator=at_least(1))
    split: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    stages_per_rank: int | None = attrs.field(default=None, validator=at_least(1))
    shared: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    stages: FSDP | None = None
    outputs: Literal["all", "last"] = "all"


@record
class CP:
    """Sequences split over the ranks of the mesh's context axis: torch's ring attention.

    Attributes:
        batch: Patterns of names of the tensors in a batch to split, such as `input_ids`, or `0`
            for the first of a tuple. Empty splits every tensor that has dimension `dim`.
        dim: Their token dimension.
        tables: Patterns of names of parameters and buffers with one row per position, such as
            learned position embeddings or rotary angles; forward sees the rows of this rank's
            tokens.
        balance: Give each rank two parts, one from the start and its mirror image from the end,
            so that causal attention costs every rank the same.
        rotate: How keys and values reach the other ranks: allgather: all at once; alltoall:
            from neighbor to neighbor, which stores the parts of two ranks at a time.
        causal: Treat attention as causal whatever the model passes, and drop masks. For models
            that build a mask from positions, as those of transformers do.
    """

    batch: tuple[str, ...] = ()
    dim: int = attrs.field(default=1, validator=at_least(0))
    tables: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    balance: bool = True
    rotate: Literal["allgather", "alltoall"] = "allgather"
    causal: bool = False


def token_ranges(
    length: int, ranks: int, rank: int, *, balance: bool
) -> tuple[tuple[int, int], ...] | None:
    """Start and number of the tokens that a rank gets of a sequence, in their local order.

    None if the length is not divisible by the ranks, or by twice as many with balance.

    Example:
        >>> token_ranges(8, 2, 0, balance=True), token_ranges(8, 2, 1, balance=True)
        (((0, 2), (6, 2)), ((2, 2), (4, 2)))
        >>> token_ranges(8, 2, 1, balance=False)
        ((4, 4),)
    """
    if ranks == 1:
        return ((0, length),)
    parts = 2 * ranks if balance else ranks
    if length % parts:
        return None
    size = length // parts
    chunks = (rank, parts - 1 - rank) if balance else (rank,)
    return tuple((part * size, size) for part in chunks)


@record
class LocalSGD:
    """Every replica trains independently, and all are averaged every few updates.

    With `every=1` and plain SGD this is DDP within rounding. With one replica it has no effect.

    Attributes:
        every: Optimizer updates between averages. The end of an epoch also averages.
    """

    kind: Literal["local_sgd"] = attrs.field(default="local_sgd", init=False)
    every: int = attrs.field(validator=at_least(1))


@record
class DiLoCo:
    """Like `LocalSGD`, but an outer SGD moves the parameters towards the average.

    The mean change of the replicas since the last round is the negative of its gradient. With
    `outer_lr=1` and `outer_momentum=0` this is `LocalSGD`.

    Attributes:
        every: Optimizer updates in a round. The end of an epoch also ends one.
        outer_lr: Learning rate of the outer SGD.
        outer_momentum: Its momentum.
        nesterov: Whether to use Nesterov momentum.
        fragments: Parts of the model, of about equal size, that are averaged in turn: each once in
            `every` updates.
        delay: Updates that replicas make while a fragment is averaged. What they change in the
            fragment meanwhile is replaced by the result.
        compress: "int8" sends the changes of parameters in eight bits, with a scale for each 1024,
            and adds what that loses to what is sent the next time.
    """

    kind: Literal["diloco"] = attrs.field(default="diloco", init=False)
    every: int = attrs.field(validator=at_least(1))
    outer_lr: float = attrs.field(default=0.7, validator=above(0))
    outer_momentum: float = attrs.field(default=0.9, validator=at_least_and_below(0, 1))
    nesterov: bool = True
    fragments: int = attrs.field(default=1, validator=at_least(1))
    delay: int = attrs.field(default=0, validator=at_least(0))
    compress: Literal["none", "int8"] = "none"

    def __attrs_post_init__(self) -> None:
        if self.fragments > self.every:
            raise PlanError(
                f"DiLoCo(every={self.every}, fragments={self.fragments}): one fragment is averaged "
                f"at an update. Use at most fragments={self.every}."
            )
        if self.delay >= self.every:
            raise PlanError(
                f"DiLoCo(every={self.every}, delay={self.delay}): a fragment is applied before it "
                f"is averaged again. Use at most delay={self.every - 1}."
            )


def fragments_due(local: LocalSGD | DiLoCo, position: Position) -> tuple[int, ...]:
    """The fragments of a model whose average starts at a position, before the end of the data.

    Example:
        >>> import fxtrain as fx
        >>> local = fx.DiLoCo(every=4, fragments=2)
        >>> [fragments_due(local, fx.Position(updates=n)) for n in range(1, 7)]
        [(), (0,), (), (1,), (), (0,)]
    """
    updates = position.updates
    if not updates or position.micro:
        return ()
    count = local.fragments if isinstance(local, DiLoCo) else 1
    starts = [(number + 1) * local.every // count for number in range(count)]
    return tuple(n for n, start in enumerate(starts) if not (updates - start) % local.every)


def round_ends(local: LocalSGD | DiLoCo, position: Position) -> bool:
    """Whether parameters become those of an average at a position.

    That is every few updates, and where the data ends. With `DiLoCo(fragments=...)` it is one
    fragment, and the whole model where the data ends.

    Example:
        >>> import fxtrain as fx
        >>> local = fx.LocalSGD(every=4)
        >>> [n for n in range(12) if round_ends(local, fx.Position(updates=n))]
        [4, 8]
        >>> round_ends(local, fx.Position(updates=7, is_last=True))
        True
    """
    delay = local.delay if isinstance(local, DiLoCo) else 0
    begun = attrs.evolve(position, updates=max(0, position.updates - delay))
    return position.is_last or bool(fragments_due(local, begun))
