"""The config of the DeepSpeed strategy, and the marker for its file's optimizer. Data only."""

import json
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import attrs

from fxtrain._record import OF_MODEL, at_least, record
from fxtrain.errors import PlanError
from fxtrain.state.parsing import parse_json

_COUNT = at_least(0)
_SIZE = at_least(1)


def _canonical(value: str | Mapping[str, object] | None) -> str | None:
    """JSON text in canonical form, so that equal configs make equal plans; a path unchanged."""
    if isinstance(value, Mapping):
        return _one_form(value)
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return _one_form(parse_json(value))
    except ValueError as error:
        raise PlanError(
            f"DeepSpeed(config=...) looks like JSON text, but is invalid: {error}. "
            f"Pass a path, a dict, or JSON text."
        ) from None


def _one_form(data: Any) -> str:
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"DeepSpeed(config=...): {error}. A DeepSpeed config only contains JSON values: "
            f"tables, lists, strings, finite numbers, true, false and null."
        ) from None


@record
class DeepSpeed:
    """ZeRO by DeepSpeed: optimizer states, gradients and parameters sharded over the data ranks.

    None leaves an entry to the file, then to DeepSpeed's default, and so do the defaults of the
    plan's precision, accumulate and clip_norm. An entry given both here and in the file must be
    equal, or `"auto"` in the file.

    Attributes:
        stage: 0 replicates everything, 1 shards optimizer states, 2 gradients too, 3 parameters
            too; 2 if neither this nor the file sets it.
        config: A DeepSpeed JSON file's path, or its content as text or dict (kept as text).
        offload_optimizer: Where optimizer states are stored and updates are computed; stages 1
            to 3, nvme only at 3.
        offload_parameters: Where parameters are stored when not in use; stage 3.
        nvme_path: Folder on a local drive for offloading to nvme.
        pin_memory: Whether offloaded tensors are in pinned memory.
        cpu_optimizer: With an offloaded optimizer, auto uses DeepSpeed's compiled one for torch's
            Adam, AdamW and Adagrad, and warns if there is no compiler; deepspeed makes that an
            error; torch keeps the optimizer that the factory made.
        partial_ranks: ZeRO++: ranks, usually those of a node, that hold a second copy of the
            parameters between them; stage 3.
        quantized_weights: ZeRO++: send parameters as 8-bit numbers; stage 3.
        quantized_gradients: ZeRO++: send gradients as 4-bit numbers; stage 3.
        leaf_modules: Classes, such as blocks of experts, whose parameters are gathered
            together; stage 3.
        gather_16bit_weights: DeepSpeed's own export gathers full weights; stage 3.
        tensor_parallel: AutoTP over this many ranks, the mesh's `tensor` axis.
        sequence_parallel: Ulysses over this many ranks, the mesh's `context` axis.
        reduce_bucket: Elements reduced at a time.
        allgather_bucket: Elements gathered at a time; stages 1 and 2.
        prefetch_bucket: Elements gathered ahead of use; stage 3.
        persistence_threshold: Parameters with fewer elements are not sharded; stage 3.
        overlap: Reduce gradients while backward runs.
        micro_batch: Rows of a micro-batch on one rank. Only DeepSpeed's own counts and logs
            depend on it.

    Example:
        >>> import fxtrain as fx
        >>> plan = fx.Plan(strategy=fx.DeepSpeed(stage=3), precision="bf16")
        >>> fx.interop.deepspeed_config(plan)["zero_optimization"]
        {'stage': 3}
    """

    kind: Literal["deepspeed"] = attrs.field(default="deepspeed", init=False)
    stage: int | None = attrs.field(default=None, validator=at_least(0, 3))
    config: str | None = attrs.field(default=None, converter=_canonical)
    offload_optimizer: Literal["cpu", "nvme"] | None = None
    offload_parameters: Literal["cpu", "nvme"] | None = None
    nvme_path: str | None = None
    pin_memory: bool | None = None
    cpu_optimizer: Literal["auto", "deepspeed", "torch"] = "auto"
    partial_ranks: int | None = attrs.field(default=None, validator=_SIZE)
    quantized_weights: bool | None = None
    quantized_gradients: bool | None = None
    leaf_modules: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    gather_16bit_weights: bool | None = None
    tensor_parallel: int | None = attrs.field(default=None, validator=_SIZE)
    sequence_parallel: int | None = attrs.field(default=None, validator=_SIZE)
    reduce_bucket: int | None = attrs.field(default=None, validator=_SIZE)
    allgather_bucket: int | None = attrs.field(default=None, validator=_COUNT)
    prefetch_bucket: int | None = attrs.field(default=None, validator=_COUNT)
    persistence_threshold: int | None = attrs.field(default=None, validator=_COUNT)
    overlap: bool | None = None
    micro_batch: int | None = attrs.field(default=None, validator=_SIZE)


@record
class FromConfig:
    """Values for `"auto"` in the optimizer and scheduler sections of a DeepSpeed config.

    Attributes:
        lr: Learning rate, also at the end of a warm-up.
        weight_decay: Weight decay.
        betas: Adam's two decay rates.
        eps: Adam's epsilon.
        total_num_steps: Updates of the whole run.
        warmup_num_steps: Updates of the warm-up.
        warmup_min_lr: Learning rate at the start of a warm-up.
        warmup_max_lr: Learning rate at its end; by default `lr`.
    """

    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None
    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None

    def __call__(self, made_for: Any) -> NoReturn:
        """Raise: only DeepSpeed can create the optimizer of its file."""
        raise PlanError(
            "fx.from_config takes the optimizer or scheduler from a DeepSpeed config, and this "
            "plan has none. Use Plan(strategy=fx.DeepSpeed(config=...)), or pass a factory: "
            "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)."
        )


def from_config(made_for: object = None, /, **values: Any) -> FromConfig:
    """Take the optimizer or the scheduler from the DeepSpeed config of the plan.

    Args:
        made_for: Not given; present so that the bare name is a factory like any other.
        **values: Values for `"auto"` there; see `FromConfig`.

    Raises:
        PlanError: a value is invalid.
        TypeError: a value is unknown.

    Example:
        >>> import fxtrain as fx
        >>> fx.from_config(lr=3e-4).lr
        0.0003
    """
    asked = FromConfig(**values)
    return asked if made_for is None else asked(made_for)
