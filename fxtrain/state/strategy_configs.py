"""Strategy configs: how a plan distributes a model. Data only."""

from typing import Literal

import attrs

from fxtrain._record import above, at_least, record


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
        warn_recompiles: Warn if a step is compiled again after the first ones.

    Example:
        >>> import fxtrain as fx
        >>> plan = fx.Plan(strategy=fx.XLA(), precision="bf16")
        >>> plan.strategy.downcast
        False
    """

    kind: Literal["xla"] = attrs.field(default="xla", init=False)
    blocks: tuple[str, ...] = ()
    downcast: bool = False
    warn_recompiles: bool = True
