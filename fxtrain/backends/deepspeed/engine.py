"""From a module and a resolved config to a DeepSpeed engine, over the ranks of a context."""

import copy
import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fxtrain._optional import optional
from fxtrain.errors import MissingPackageError
from fxtrain.ops.connecting import ensure_group, export_local_rank
from fxtrain.ops.opening import open_by_members
from fxtrain.state import DistContext, Plan

_MIN_VERSION = (0, 19)


def load(needed_by: str = "Plan(strategy=DeepSpeed(...))") -> ModuleType:
    """The deepspeed package.

    Raises:
        MissingPackageError: deepspeed is not installed, or older than 0.19.
    """
    with _ignore_import_warnings():
        library = optional("deepspeed", extra="deepspeed", needed_by=needed_by)
    version = str(library.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        wanted = ".".join(map(str, _MIN_VERSION))
        raise MissingPackageError(
            f"{needed_by} needs deepspeed {wanted} or newer, but {version} is installed. "
            f"Install it with: pip install --upgrade 'deepspeed>={wanted}'",
            name="deepspeed",
        )
    return library


def device_problems(ctx: DistContext, plan: Plan) -> tuple[str, ...]:
    """Problems of the device with a plan."""
    accelerator = load().accelerator.get_accelerator()
    name = accelerator.device_name()
    if name != ctx.device.type:
        if ctx.comm.simulated:  # the ranks may run on other machines than this one
            return ()
        return (
            f"DeepSpeed computes on {name} here, but this context is on {ctx.device.type}. Set the "
            f"variable DS_ACCELERATOR={ctx.device.type} before the run starts.",
        )
    supports = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    compute = plan.precision.compute
    if compute in supports and not supports[compute]():
        return (f"DeepSpeed does not support {compute} on {name}. Use precision='fp32'.",)
    return ()


def connect(library: ModuleType, ctx: DistContext) -> None:
    """Make DeepSpeed use torch's existing process group.

    Effects:
        At one rank, opens a group of one. DeepSpeed opens one more group of all ranks, and
        finds LOCAL_RANK in the environment.
    """
    ensure_group(ctx)
    export_local_rank(ctx)
    groups = library.utils.groups
    known = dist.distributed_c10d._world.pg_map
    if groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in known:
        # A closed and reopened context left DeepSpeed its destroyed groups.
        groups._release_process_group_references(None)
    release_groups(library, ctx)
    if library.comm.is_initialized():
        return
    # Its shared-memory operator, which compiles for half a minute, is for inference only.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with _ignore_import_warnings():
        library.init_distributed(
            dist_backend=library.accelerator.get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            verbose=False,
        )


def start(
    library: ModuleType,
    module: nn.Module,
    config: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    ctx: DistContext,
) -> Any:
    """The engine.

    Effects:
        With sequence parallelism, opens a group of this rank alone.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    settings = copy.deepcopy(dict(config))
    groups = sequence_groups(library, ctx)
    if groups is not None:
        library.utils.groups.mpu = groups
        # From these it would create its own groups, which lack the reduction over sequences.
        settings.pop("sequence_parallel_size", None)
        settings.pop("data_parallel_size", None)
    if ctx.axis("tensor").world_size > 1:
        del settings["train_batch_size"]  # DeepSpeed also counts the tensor ranks
    with _ignore_import_warnings():
        engine, *_ = library.initialize(
            model=module,
            optimizer=optimizer,
            model_parameters=trained,
            mpu=groups,
            config=settings,
        )
    return engine


def clip_at_stage_0(engine: Any) -> None:
    """Make stage 0 behave as the other stages do.

    Effects:
        In full precision, the engine stores the norm by which it clips. In half precision, the
        optimizer undoes the update with zero gradients by which it created its states: that
        update changed weights under weight decay, and counted as a step.
    """
    if hasattr(engine.optimizer, "fp32_groups"):
        engine.basic_optimizer.state.clear()
        pairs = zip(engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True)
        for masters, weights in pairs:
            for master, weight in zip(masters, weights, strict=True):
                master.data.copy_(weight.data)
    elif engine.optimizer is engine.basic_optimizer:
        engine.clip_fp32_gradients = functools.partial(_clip_and_keep, engine)


def _clip_and_keep(engine: Any) -> None:
    engine._global_grad_norm = load().runtime.utils.clip_grad_norm_(
        parameters=engine.module.parameters(),
        max_norm=engine.gradient_clipping(),
        mpu=engine.mpu,
    )


@contextmanager
def _ignore_import_warnings() -> Iterator[None]:
    """Ignore the warnings of DeepSpeed's imports about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def sequence_groups(library: ModuleType, ctx: DistContext) -> SimpleNamespace | None:
    """What DeepSpeed calls an mpu, if sequences are split over the mesh's `context` axis.

    Without one, DeepSpeed 0.19 reduces gradients over the data ranks only, and the ranks of one
    sequence diverge.

    Effects:
        Opens a group of this rank alone.
    """
    sequence = ctx.axis("context")
    if sequence.world_size == 1:
        return None
    # The group of all ranks, over which gradients are reduced and ZeRO shards.
    everyone = library.utils.groups._clone_world_group()
    alone = open_by_members([ctx.rank], timeout=timedelta(seconds=ctx.comm.timeout_s))
    answers = {
        # The ranks over which overflow is checked, and whose first rank saves.
        "data_parallel_group": everyone,
        "data_parallel_group_ranks": list(range(ctx.world_size)),
        "data_parallel_world_size": ctx.axis("data").world_size,
        "data_parallel_rank": ctx.rank,
        "sequence_parallel_group": sequence.comm.group,
        "sequence_parallel_world_size": sequence.world_size,
        "sequence_parallel_rank": sequence.rank,
        "sequence_data_parallel_group": everyone,
        "sequence_data_parallel_world_size": ctx.world_size,
        "sequence_data_parallel_rank": ctx.rank,
        "model_parallel_group": alone,
        "model_parallel_world_size": 1,
        "model_parallel_rank": 0,
    }
    functions = {f"get_{name}": functools.partial(_given, each) for name, each in answers.items()}
    return SimpleNamespace(ctx=ctx, **functions)


def _given(value: Any) -> Any:
    return value


def release_groups(library: ModuleType, ctx: DistContext) -> None:
    """Remove from DeepSpeed the groups that engines of another plan, mesh or context left there.

    It keeps one set per process and never replaces them: a later engine would use old ones.
    """
    groups = library.utils.groups
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # engines keep their own
    if getattr(groups.mpu, "ctx", ctx) is not ctx:
        groups.mpu = None
    ranks = dist.distributed_c10d._world.pg_group_ranks
    if tuple(ranks.get(groups._TENSOR_MODEL_PARALLEL_GROUP, ())) == ctx.axis("tensor").comm.ranks:
        return
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None
    if groups.mpu is groups:
        groups.mpu = None
