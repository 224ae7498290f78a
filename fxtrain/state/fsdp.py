"""The config of sharded data parallelism. Data only."""

import re
from collections.abc import Callable
from typing import Any, Literal, cast

import attrs

from fxtrain._record import at_least, record
from fxtrain.state.tensor_parallel import TP

_PATH = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")


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
    """

    kind: Literal["fsdp"] = attrs.field(default="fsdp", init=False)
    mode: Literal["full", "grads_and_optimizer", "none"] = "full"
    shard: int | None = attrs.field(default=None, validator=at_least(1))
    wrap: tuple[str, ...] = ()
    min_params: int | None = attrs.field(default=None, validator=at_least(1))
    wrap_by: str | None = attrs.field(
        default=None,
        converter=_path_of,
        validator=_is_path,
        metadata={"choose": "a function at the top of a module, or 'package.module:function'"},
    )
    ignore: tuple[str, ...] = ()
    param_dtype: Literal["plan", "fp32", "bf16", "fp16"] = "plan"
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    cast_inputs: bool = True
    offload: bool = False
    pin: bool = True
    forward_prefetch: int = attrs.field(default=0, validator=at_least(0))
    backward_prefetch: int = attrs.field(default=0, validator=at_least(0))
    unused_parameters: bool = False
    tensor: TP | None = None
