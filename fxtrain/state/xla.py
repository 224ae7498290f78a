"""The config of the XLA strategy. Data only."""

from typing import Literal

import attrs

from fxtrain._record import record

__all__ = ["XLA"]


@record
class XLA:
    """torch_xla: each step becomes one graph, compiled for a TPU or what else PJRT drives.

    A process with several devices runs one program over all of them (SPMD): rows are split
    over the mesh's axes replicate and shard, parameters over shard. Where each device has a
    process, each holds a replica.

    Attributes:
        blocks: Class names of repeated blocks, at whose ends sharded programs are cut into
            parts; by default the model's own list, or what its ModuleLists hold.
        downcast: Hold the model in bf16, rather than computing in bf16 over fp32 parameters.
        warn_recompiles: Warn when a step that should be compiled by now is compiled again.

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
