"""The strategy record: the functions by which one backend carries out one kind of plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from fxtrain._errors import FxError, PlanError, StepError
from fxtrain.state.batch import Batch
from fxtrain.state.context import DistContext
from fxtrain.state.plan import Plan
from fxtrain.state.position import Position
from fxtrain.state.weight import Weight
from fxtrain.state.window import AccumulationWindow

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "FlatShard",
    "ModelState",
    "Round",
    "StateReader",
    "Strategy",
    "UpdateResult",
    "UpdateSpec",
    "WeightedLoss",
    "Wrapped",
    "check_open",
    "round_of",
    "unsupported",
]


@attrs.frozen(kw_only=True)
class UpdateSpec:
    """What an update must do before the optimizer runs.

    Attributes:
        scale: Factor on every gradient, a number or scalar tensor; None leaves them.
        clip_norm: Largest total norm; None does not clip.
        clip_value: Largest absolute entry; None does not clip.
        skip: Leave the update out; equal on every rank.
        keep_parameters: The update counts, but parameters of this rank stay: it trains alone
            (`Plan.local`) and had no rows.
    """

    scale: Any = attrs.field(default=None, eq=False)
    clip_norm: float | None = None
    clip_value: float | None = None
    skip: bool = False
    keep_parameters: bool = False


@attrs.frozen(kw_only=True, eq=False)
class UpdateResult:
    """What an update did. Identity decides equality and hash, as of the tensor inside.

    Attributes:
        applied: The optimizers ran.
        grad_norm: Total norm before clipping, where one was computed.
    """

    applied: bool
    grad_norm: torch.Tensor | None = None


@attrs.frozen(kw_only=True, eq=False)
class Round:
    """What copies of a model that train alone keep from one average to the next.

    Identity decides equality and hash: the tensors change in place.

    Attributes:
        copies: The ranks that hold the same part of each copy.
        within: The ranks of this copy, over which its gradients are averaged.
        peers: Their numbers on the data axis.
        parameters: What is averaged beside buffers, by name.
        rows: On the CPU, int64, shape (3,): rows of this replica, those of all replicas together,
            and micro-batches with a `Weighted` loss, in the updates since the last average.
        weight: On the device, a number: the weight of this rank's `Weighted` losses in them.
        open_rows: As `rows`, of the open accumulation window.
        open_weight: As `weight`, of the open accumulation window.
        anchor: Where parameters stood then, by name; only with an outer optimizer.
        momentum: Of the outer optimizer, by name.
    """

    copies: DistContext
    within: DistContext
    peers: tuple[int, ...]
    parameters: Mapping[str, nn.Parameter] = attrs.field(repr=False)
    rows: torch.Tensor = attrs.field(repr=False)
    weight: torch.Tensor = attrs.field(repr=False)
    open_rows: torch.Tensor = attrs.field(repr=False)
    open_weight: torch.Tensor = attrs.field(repr=False)
    anchor: Mapping[str, torch.Tensor] = attrs.field(factory=dict, repr=False)
    momentum: Mapping[str, torch.Tensor] = attrs.field(factory=dict, repr=False)


@attrs.frozen(kw_only=True, eq=False)
class WeightedLoss:
    """One micro-batch's part in its update. Identity decides equality and hash.

    Attributes:
        loss: What backward starts from.
        mean: The micro-batch's own mean loss, detached.
        weight: What that mean averages over.
        aux: What the loss function returned beside the loss.
        provisional: The loss is multiplied by about what it should be, so that gradients have to be
            corrected by the weight of the window when it closes.
    """

    loss: torch.Tensor
    mean: torch.Tensor
    weight: Any
    aux: Any = None
    provisional: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Wrapped:
    """A model made ready for a context and a plan; call it like the model.

    Identity decides equality and hash: the torch objects inside change in place.

    Attributes:
        module: The user's module.
        engine: What runs forward: the module itself, or what the strategy put around it.
        optimizer: What the optimizer factory returned, or None.
        scheduler: What the scheduler factory returned, or None.
        optimizers: Every optimizer, in order.
        schedulers: Every scheduler, in order.
        scaler: The fp16 loss scaler, or None.
        ctx: The context it was wrapped for.
        plan: The plan it was wrapped under.
        strategy: The functions that carry the plan out.
        window: What the micro-batches of the open accumulation window add up to.
        undo: Takes back what wrapping did to the module.
        bare: () → function: takes off the module what wrapping put on it, until the function is
            called, which puts everything back as it was. Values are left alone.
        formats: By name, the dtypes with which parameters and buffers came.
        closed: Why the handle cannot be used: empty while it can, then the one word "unwrap" for
            good, or "gathered" while a block of `fx.gathered` runs. The one thing in this record
            that changes, and a list, since whoever holds the handle or a copy of it with another
            field (`StepFns`, `attrs.evolve`) must learn of it: they all share one module.
        strategy_state: What only this strategy keeps, as a record of its own type: a `Round` of
            copies that train alone (DDP and FSDP under `Plan.local`), the config of DeepSpeed's
            engine, XLA's count of compilations; None where there is nothing to keep.
        by_hand: Empty, or the one word "ops.backward" while gradients are there that this call
            added: the next step adds to them. A list for the same reason.
    """

    module: nn.Module
    engine: Any
    optimizer: Any = None
    scheduler: Any = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    scaler: torch.amp.GradScaler | None = None
    ctx: DistContext
    plan: Plan
    strategy: Strategy = attrs.field(repr=False)
    window: AccumulationWindow = attrs.field(repr=False)
    undo: Callable[[], None] = attrs.field(repr=False)
    strategy_state: Any = attrs.field(default=None, repr=False)
    bare: Callable[[], Callable[[], None]] = attrs.field(default=lambda: _nothing, repr=False)
    formats: Mapping[str, torch.dtype] = attrs.field(factory=dict, repr=False)
    closed: list[str] = attrs.field(factory=list)
    by_hand: list[str] = attrs.field(factory=list, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.closed:
            check_open(self, "calling the model")
        return self.strategy.forward(self, args, kwargs)

    def train(self) -> Wrapped:
        """Put the module into training mode and return this handle."""
        check_open(self, "train")
        self.engine.train()
        return self

    def eval(self) -> Wrapped:
        """Put the module into evaluation mode and return this handle."""
        check_open(self, "eval")
        self.engine.eval()
        return self

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the module as the strategy holds them."""
        check_open(self, "parameters")
        return self.module.parameters()


@attrs.frozen(kw_only=True, eq=False)
class FlatShard:
    """This rank's part of a tensor that ranks hold in stretches of its elements.

    So engines cut parameters that they flatten. Identity decides equality and hash.

    Attributes:
        shape: Of the whole tensor.
        start: Elements before the part, in the order in which torch lays them out.
        values: The part, live, with one dimension; it may be empty.
    """

    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class ModelState:
    """Everything that a wrapped model needs to go on as if it had not been stopped.

    Tensors are the live ones, not copies. Identity decides equality and hash.

    Attributes:
        tensors: By name, the same names and shapes on every rank that holds them. A DTensor
            or a `FlatShard` is spread over ranks; any other is the same on all.
        own: By name, tensors that differ between ranks.
        values: A tree of plain values and tensors, the same on every rank.
        varies_by_rank: Names of tensors of which rank 0's counts, but which may differ between
            ranks, such as the buffers of replicas. Where they do, each rank's is kept too.
        constant_between_steps: Names of tensors that nothing but a step of `model.optimizers`
            changes, so that they may be copied until then.
    """

    tensors: Mapping[str, torch.Tensor | FlatShard]
    own: Mapping[str, torch.Tensor]
    values: Any
    varies_by_rank: frozenset[str] = frozenset()
    constant_between_steps: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True, eq=False)
class StateReader:
    """A saved `ModelState`, to be read piece by piece. Identity decides equality and hash.

    Attributes:
        shapes: (shape, dtype) of each tensor by name.
        fill: (name, tensor) → None; reads into a tensor, plain or spread, or into a stretch.
        values: As they were saved.
        own: (name, rank) → the tensor of its own that a rank saved, or None.
        ranks: How many saved.
        rank: Which of them this rank is, of `loading_ranks` that load.
        loading_ranks: How many load.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    fill: Callable[[str, torch.Tensor | FlatShard], None]
    values: Any
    own: Callable[[str, int], torch.Tensor | None]
    ranks: int
    rank: int
    loading_ranks: int


@attrs.frozen(kw_only=True)
class Strategy:
    """How one backend carries out one kind of plan: functions only, no state.

    Every function has the same signature in every backend, and none of them is optional:
    a missing ability is `unsupported(...)`. Change one with `attrs.evolve(row, sync=mine)`, and
    pass the row to `fx.wrap(..., strategy=row)`: every function is called as the row has it.

    Contract: after `backward` inside `sync(model, True)`, gradients are the mean over the
    ranks of `ctx.axis("loss")`, those of the data and context axes, of what each rank has
    accumulated since the last `zero`.

    Attributes:
        name: Shown in messages.
        config: The config type that selects this row.
        check: (ctx, plan, module) → problems, in words; no traffic, equal on all ranks.
        wrap: (row, module, ctx, plan, optimizer, scheduler) → Wrapped, whose `strategy` is the
            row.
        forward: (model, args, kwargs) → outputs.
        sync: (model, enabled) → context manager around forward and backward of a
            micro-batch, inside which gradients are reduced over ranks or not.
        backward: (loss, model) → None; applies the loss scale, if any.
        begin: (model) → None: as a window begins, drops gradients that another model's backward
            left in this one.
        run: (model, batch, compute_loss, reduce) → WeightedLoss: forward and backward of one
            micro-batch, after which gradients are reduced over ranks or not.
            `compute_loss(model, batch)` computes the loss as the user does and weighs it; a
            strategy may call it for parts of the batch, on some ranks only.
        clip_norm: (model, max_norm) → total norm before clipping, equal on every rank.
        clip_value: (model, max_value) → None.
        scale_grads: (model, factor) → None.
        finite: (model) → whether this rank's gradients are; no traffic.
        apply: (model, UpdateSpec) → UpdateResult: everything from the end of backward to parameters
            updated, with gradients unscaled, scaled, clipped, and zeroed afterwards.
        state: (model) → ModelState, for a checkpoint; called by all ranks at once.
        load_state: (model, StateReader) → None; fills the model with what was saved, at any number
            of ranks.
        weights: (model) → the tensors of the user's module by name, those of its state dict
            first and in its order; the same names on every rank, whichever holds them. No
            traffic.
        unwrap: (model) → the user's module, as it was, with whole weights.
        cuts_sequences: It carries out `Plan.context`.
        quantized: It carries models with quantised weights over several ranks.
        average: (model, position) → None: of copies that train alone, ends the round that ends
            at a position, or begins the first; at None ends one. Called only where the
            model has a `Round`.
        fused: (name, function) of functions of this row that its own `run` or `apply` never
            call, since an engine does their work in one go. `fx.wrap` refuses a row in which one
            of them was changed and `fused` was not.
    """

    name: str
    config: type
    check: Callable[[DistContext, Plan, nn.Module], tuple[str, ...]]
    wrap: Callable[[Strategy, nn.Module, DistContext, Plan, Any, Any], Wrapped]
    forward: Callable[[Wrapped, tuple[Any, ...], dict[str, Any]], Any]
    sync: Callable[[Wrapped, bool], AbstractContextManager[None]]
    backward: Callable[[torch.Tensor, Wrapped], None]
    begin: Callable[[Wrapped], None]
    run: Callable[[Wrapped, Batch, Callable[[Wrapped, Batch], WeightedLoss], bool], WeightedLoss]
    clip_norm: Callable[[Wrapped, float], torch.Tensor]
    clip_value: Callable[[Wrapped, float], None]
    scale_grads: Callable[[Wrapped, Any], None]
    finite: Callable[[Wrapped], bool]
    apply: Callable[[Wrapped, UpdateSpec], UpdateResult]
    state: Callable[[Wrapped], ModelState]
    load_state: Callable[[Wrapped, StateReader], None]
    weights: Callable[[Wrapped], dict[str, Weight]]
    unwrap: Callable[[Wrapped], nn.Module]
    cuts_sequences: bool = False
    quantized: bool = False
    average: Callable[[Wrapped, Position | None], None] = attrs.Factory(
        lambda: unsupported("average", by="This strategy")
    )
    fused: tuple[tuple[str, Callable[..., Any]], ...] = ()


def round_of(model: Wrapped) -> Round | None:
    """The round of copies that train alone; None where all updates are made together.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.state.round_of(fx.wrap(torch.nn.Linear(2, 1), ctx)) is None
        True
    """
    kept = model.strategy_state
    return kept if isinstance(kept, Round) else None


def check_open(model: Wrapped, call: str, kind: type[FxError] = StepError) -> None:
    """Refuse a handle whose module was given back, or is lent.

    Raises:
        FxError: of this kind; it says what to do.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     fx.state.check_open(model, "step")
    """
    if "unwrap" in model.closed:
        raise kind(
            f"{call}: fx.unwrap gave this model's module back and closed its handle. To continue "
            f"training, wrap the module again. To get whole weights during training, use "
            f"fx.weights(model) or `with fx.gathered(model) as net:` instead of fx.unwrap."
        )
    if model.closed:
        raise kind(
            f"{call}: fx.gathered has put whole weights into this model's module until its block "
            f"ends. Use the module that it yields inside the block, and call this after the block."
        )


def _nothing() -> None:
    """Take nothing back."""


def unsupported(what: str, *, by: str) -> Callable[..., NoReturn]:
    """A strategy function that says clearly that the backend cannot do this.

    Example:
        >>> from fxtrain.state import unsupported
        >>> unsupported("clip_value", by="XLA")()
        Traceback (most recent call last):
        fxtrain._errors.PlanError: XLA does not support clip_value.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PlanError(f"{by} does not support {what}.")

    return refuse
