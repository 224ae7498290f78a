"""The plan: all settings of a run, as one value."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs

from fxtrain._other_names import value_hint
from fxtrain._record import OF_MODEL, above, at_least, canonical, closest, record
from fxtrain.errors import PlanError
from fxtrain.state.mesh import Mesh, read_mesh
from fxtrain.state.precision import (
    FORMATS,
    Bnb4,
    Bnb8,
    Compute,
    Precision,
    QuantizeKind,
    Torchao,
    as_names,
    precision_of,
    quantize_of,
)
from fxtrain.state.registry import BUILT_IN, Config, installed_configs, kind_of
from fxtrain.state.strategy_configs import CP, DDP, TP, CommHook, DiLoCo, LocalSGD

StrategyKind = Literal["ddp", "deepspeed", "fsdp", "offload", "pp", "single", "xla"]
_canonical_bound = cast(Callable[[Any], Any], canonical(float | None))
_BY_KIND = {str(kind_of(config)): config for config in BUILT_IN}


def _is_folder(_: Any, __: Any, value: str) -> None:
    if not value.strip() or not value.isprintable():
        raise ValueError("choose a folder with a name of printable characters.")


def _are_ranks(_: Any, __: Any, value: tuple[int, ...]) -> None:
    if not value or min(value) < 0 or len(set(value)) < len(value):
        raise ValueError("choose different ranks, numbered from 0, or None for all.")


@record
class Profile:
    """Which steps of a loop are profiled, and what is recorded.

    A cycle is `wait` steps without the profiler, `warmup` steps with it whose events are
    discarded, and `active` steps that are recorded. Each cycle writes one trace per rank.

    Attributes:
        folder: Where traces are written, as `cycle-000/rank-00003.json.gz`; on every machine.
        skip_first: Steps before the first cycle.
        wait: Steps of a cycle before the profiler is started, at no cost.
        warmup: Steps of a cycle in which the profiler runs and discards what it sees, since its
            first steps are slower.
        active: Steps of a cycle that are recorded. None records the whole block, with or without
            calls of `trace.step`; the other numbers of steps have no effect then.
        repeat: Number of cycles.
        activities: Devices of which events are recorded; empty for the CPU and the context's
            device.
        shapes: Record the shapes of operators' arguments.
        memory: Record memory that operators allocate and free; on CUDA also write a snapshot of
            the allocator, `cycle-000/rank-00003.pickle`, for pytorch.org/memory_viz.
        stacks: Record Python stacks; doubles the cost and triples the size.
        flops: Count the FLOPs of matrix products, convolutions, additions and multiplications;
            records shapes too.
        modules: Record the hierarchy of modules, for TorchScript.
        ranks: The ranks that are profiled; None for all.
    """

    folder: str = attrs.field(default="profile", validator=_is_folder)
    skip_first: int = attrs.field(default=0, validator=at_least(0))
    wait: int = attrs.field(default=1, validator=at_least(0))
    warmup: int = attrs.field(default=1, validator=at_least(0))
    active: int | None = attrs.field(default=3, validator=at_least(1))
    repeat: int = attrs.field(default=1, validator=at_least(1))
    activities: tuple[Literal["cpu", "cuda", "xpu", "mtia", "hpu"], ...] = ()
    shapes: bool = False
    memory: bool = False
    stacks: bool = False
    flops: bool = False
    modules: bool = False
    ranks: tuple[int, ...] | None = attrs.field(default=None, validator=_are_ranks)


@record
class Compile:
    """How `torch.compile` is applied.

    Attributes:
        blocks: Class names of submodules to compile one by one, which shortens start-up for
            models with repeated blocks; empty compiles the whole model.
        backend: torch.compile's backend.
        mode: torch.compile's mode; None for its default.
        fullgraph: Fail on a graph break.
        dynamic: Whether shapes are dynamic; None lets torch decide.
        prepack: For inference on a CPU: inductor lays weights out as its kernels read them
            (`freezing`), under `torch.no_grad()`. They become constants, so that a weight that
            changes later has no effect.
    """

    blocks: tuple[str, ...] = attrs.field(default=(), metadata=OF_MODEL)
    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    prepack: bool = False

    def __attrs_post_init__(self) -> None:
        if self.prepack and (self.backend != "inductor" or self.mode is not None):
            raise PlanError(
                f"Compile(prepack=True, backend={self.backend!r}, mode={self.mode!r}): only "
                f"inductor prepacks weights, and torch.compile takes either a mode or such "
                f"options. Leave backend and mode out."
            )


@record
class Data:
    """Where rows come from and how they reach the device.

    Attributes:
        source: shard: every rank reads its own rows; dispatch: rank 0 reads and sends each
            rank its part; sharded: the loader of each rank already yields only its own.
        to_device: Move tensors to the context's device.
        non_blocking: Copy from pinned memory without waiting.
        reseed_workers: Seed the random generators of worker processes for every batch, from
            (seed, epoch, row), so that random augmentation does not depend on the number
            of workers or on restarts; and those from which an iterable dataset draws, with and
            without workers, so that it is the same on every rank.
        prefetch: Batches that a thread moves to an XLA device before they are used; 0 moves each
            when it is used. Other devices ignore it.
    """

    source: Literal["shard", "dispatch", "sharded"] = "shard"
    to_device: bool = True
    non_blocking: bool = True
    reseed_workers: bool = True
    prefetch: int = attrs.field(default=2, validator=at_least(0))


# Configs that are taken for strategies, and the field that each belongs to.
_OTHER_FIELDS = {
    LocalSGD: "local=fx.{}(...)",
    DiLoCo: "local=fx.{}(...)",
    CP: "context=fx.{}(...)",
    TP: "strategy=fx.FSDP(tensor=fx.{}(...))",
    CommHook: "strategy=fx.DDP(hook=fx.{}(...))",
    Compile: "compile=fx.{}(...)",
}


def _strategy_of(value: Config | StrategyKind) -> Config:
    """The config of a strategy given by its kind; any other value unchanged."""
    kind = _known_kinds(value).get(value) if isinstance(value, str) else None
    return cast(Config, value if kind is None else kind())  # the plan's check refuses all else


def _known_kinds(kind: str) -> Mapping[str, type]:
    """Configs by their kinds; those of installed packages too, unless `kind` is fxtrain's own."""
    if kind in _BY_KIND:
        return _BY_KIND
    return {**_BY_KIND, **{str(kind_of(config)): config for config in installed_configs()}}


def _compile_of(value: Compile | bool | None) -> Compile | None:  # noqa: FBT001 - a converter
    """Whether to compile, as a record; any other value unchanged."""
    return {True: Compile(), False: None}[value] if isinstance(value, bool) else value


def _bound_of(value: float | None) -> float | None:
    """A bound; infinity as the largest number, since JSON has no infinity."""
    largest = type(value) is float and value == math.inf
    return sys.float_info.max if largest else _canonical_bound(value)


def _mesh_of(value: Mesh | str | None) -> Mesh | None:
    """A mesh given as text, such as "shard=8,tensor=2"; any other value unchanged."""
    return read_mesh(value) if isinstance(value, str) else value


def _is_strategy(_: Any, __: Any, value: Any) -> None:
    if isinstance(value, str):
        kinds = _known_kinds(value)
        raise ValueError(
            f"choose a strategy config, such as fx.FSDP(), or one of "
            f"{', '.join(map(repr, kinds))}."
            f"{value_hint('strategy', value) or closest(value, kinds)}"
        )
    if type(value) in _OTHER_FIELDS:
        use = _OTHER_FIELDS[type(value)].format(type(value).__name__)
        raise ValueError(f"choose a strategy config, such as fx.DDP(). Use Plan({use}).")
    named = isinstance(getattr(value, "kind", None), str)
    if isinstance(value, type) or not attrs.has(type(value)) or not named:
        raise ValueError("choose a strategy config, such as fx.DDP() or fx.Single().")
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"choose a hashable config; {type(value).__name__} has to be frozen, with tuples "
            f"instead of lists."
        ) from None


@record
class Plan:
    """How to train a model and split its data. A value: compare, hash, store or diff it.

    Attributes:
        strategy: How the model is distributed over ranks: one of fxtrain's configs, or a third
            party's: a frozen attrs record with a string `kind`. The bare kind also works: "ddp",
            "fsdp", "deepspeed", "pp", "single", "xla", "offload", or that of a strategy of an
            installed package.
        precision: Dtypes, or the bare name fp32, bf16, fp16 or fp8.
        accumulate: Micro-batches per optimizer update.
        flush: Close the accumulation window at the end of an epoch even if it is short.
        sync_each: Reduce gradients after every micro-batch, which costs traffic and saves
            the memory of unreduced gradients.
        clip_norm: Maximum total gradient norm; None does not clip. Infinity, which becomes the
            largest number, only measures the norm.
        clip_value: Maximum absolute value of a gradient entry; None does not clip.
        nonfinite: What to do with an update whose loss or gradient is non-finite.
        schedule: Whether schedulers advance once per update, by rows seen, with each update once
            for each data rank, as Accelerate's do (for a scheduler written for the batches of the
            loader before it is sharded), or at the end of each epoch.
        weigh_by: What has equal weight in an update: each row, or each micro-batch, 1 / accumulate
            in short windows too, as in Accelerate: to compare a ported script with its original
            step by step. `fx.Weighted` losses have weights of their own.
        batch: Whether the loader's batch size is per rank or for all ranks together.
        even: What to do if rows are not divisible: pad repeats rows from the start and marks
            them invalid, drop skips the remaining rows, uneven gives some ranks fewer rows, or
            none that count.
        data: Where rows come from.
        seed: Seed of the data order.
        recompute: Class names of submodules whose activations are recomputed in backward; one
            name, or several.
        recompute_every: Recompute every n-th of those submodules only; the others keep theirs.
        recompute_keep: Operations in those submodules whose results are kept nevertheless:
            matrix products, attention.
        compile: How to compile the model: True uses default settings; None or False does not.
        methods: Methods of the model that compute with its parameters, beside `forward`:
            `model.NAME(...)` runs them as it runs `forward`; one name, or several.
        context: How to split sequences over the mesh's context axis; None does not split them.
        local: Train replicas independently for a number of updates, then average them; None
            makes every update together.
        quantize: Format of frozen weights: fx.Bnb8(), fx.Bnb4() or fx.Torchao(), or the bare kind,
            such as "bnb4". `fx.wrap` quantizes layers that are not quantized yet; None leaves
            weights as they are.
        frozen: What checkpoints store of parameters that do not require grad: their values, or
            digests, with which a restore compares the model's own. Digests suit adapters over a
            base model that is loaded before.
        profile: Which steps `fx.profile(ctx, plan)` records; None for none.
        verify_replicas: After every so many updates, ranks that hold replicas compare digests of
            parameters and optimizer states, since faulty hardware computes wrong numbers without an
            error; 0 never compares them.
        replicas_differ: What to do if they differ: raise an error on all ranks, or overwrite what
            differs with what most ranks hold, and raise if there is no majority.
        mesh: Ranks per axis, or text such as "shard=8,tensor=2". `fx.detect` opens the mesh of the
            launch's plan, and `fx.wrap` compares it with the context's; None accepts any.

    Example:
        >>> import fxtrain as fx
        >>> plan = fx.Plan(precision="bf16", accumulate=4)
        >>> plan.precision.compute
        'bf16'
        >>> [change.path for change in fx.diff(plan, fx.Plan(precision="bf16"))]
        ['accumulate']
    """

    strategy: Any = attrs.field(
        default=DDP(),
        converter=_strategy_of,
        validator=_is_strategy,
        metadata={"union": "strategies"},
    )
    precision: Precision = attrs.field(
        default=Precision(),
        converter=precision_of,
        metadata={"choose": f"one of {', '.join(map(repr, FORMATS))}, or an fx.Precision(...)"},
    )
    accumulate: int = attrs.field(default=1, validator=at_least(1))
    flush: bool = True
    sync_each: bool = False
    clip_norm: float | None = attrs.field(default=None, converter=_bound_of, validator=above(0))
    clip_value: float | None = attrs.field(default=None, converter=_bound_of, validator=above(0))
    nonfinite: Literal["ignore", "skip", "raise"] = "ignore"
    schedule: Literal["update", "samples", "ranks", "epoch"] = "update"
    weigh_by: Literal["rows", "batches"] = "rows"
    batch: Literal["per_rank", "global"] = "per_rank"
    even: Literal["pad", "drop", "uneven"] = "pad"
    data: Data = Data()
    seed: int = 0
    recompute: tuple[str, ...] = attrs.field(
        default=(),
        converter=as_names,
        metadata={"choose": "the class names of modules, such as ['Block']", **OF_MODEL},
    )
    recompute_every: int = attrs.field(default=1, validator=at_least(1), metadata=OF_MODEL)
    recompute_keep: tuple[Literal["matmul", "attention"], ...] = attrs.field(
        default=(), metadata=OF_MODEL
    )
    compile: Compile | None = attrs.field(
        default=None, converter=_compile_of, metadata={"choose": "true, an fx.Compile(...) or None"}
    )
    methods: tuple[str, ...] = attrs.field(
        default=(),
        converter=as_names,
        metadata={"choose": "the names of methods of the model, such as ['encode']"},
    )
    context: CP | None = None
    local: LocalSGD | DiLoCo | None = None
    frozen: Literal["values", "digests"] = "values"
    quantize: Bnb8 | Bnb4 | Torchao | None = attrs.field(default=None, converter=quantize_of)
    profile: Profile | None = None
    verify_replicas: int = attrs.field(default=0, validator=at_least(0))
    replicas_differ: Literal["raise", "heal"] = "raise"
    mesh: Mesh | None = attrs.field(default=None, converter=_mesh_of)

    if TYPE_CHECKING:  # mypy does not see the short forms that converters take

        def __init__(
            self,
            *,
            strategy: Config | StrategyKind = ...,
            precision: Precision | Compute = ...,
            accumulate: int = 1,
            flush: bool = True,
            sync_each: bool = False,
            clip_norm: float | None = None,
            clip_value: float | None = None,
            nonfinite: Literal["ignore", "skip", "raise"] = "ignore",
            schedule: Literal["update", "samples", "ranks", "epoch"] = "update",
            weigh_by: Literal["rows", "batches"] = "rows",
            batch: Literal["per_rank", "global"] = "per_rank",
            even: Literal["pad", "drop", "uneven"] = "pad",
            data: Data = ...,
            seed: int = 0,
            recompute: str | Sequence[str] = (),
            recompute_every: int = 1,
            recompute_keep: Sequence[Literal["matmul", "attention"]] = (),
            compile: Compile | bool | None = None,
            methods: str | Sequence[str] = (),
            context: CP | None = None,
            local: LocalSGD | DiLoCo | None = None,
            frozen: Literal["values", "digests"] = "values",
            quantize: Bnb8 | Bnb4 | Torchao | QuantizeKind | None = None,
            profile: Profile | None = None,
            verify_replicas: int = 0,
            replicas_differ: Literal["raise", "heal"] = "raise",
            mesh: Mesh | str | None = None,
        ) -> None: ...
