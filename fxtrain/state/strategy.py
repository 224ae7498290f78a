"""The strategy record: the functions by which one backend carries out one kind of plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from fxtrain._display import brief, number
from fxtrain.errors import PlanError
from fxtrain.state.batch import Batch
from fxtrain.state.context import DistContext
from fxtrain.state.mesh import Mesh
from fxtrain.state.plan import Plan
from fxtrain.state.position import Position
from fxtrain.state.window import ModelState, StateReader, Weight
from fxtrain.state.wrapped import Wrapped

if TYPE_CHECKING:
    import torch
    from torch import nn


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """One micro-batch of an accumulation window, as a strategy runs it.

    Attributes:
        batch: The batch.
        closes: Whether the window closes after it, so that an update is due.
        reduces: Whether gradients are reduced over ranks in its backward.
        has_rows: Whether this rank has a row in it. A rank without one computes with a placeholder,
            to take part in collectives, and what it computes counts for nothing.
        nested: Whether an `ops.sync` block of the model is open around it.
        buffers: On a rank without a row whose forward has run already, the buffers of the module
            before it, by name; None otherwise.
    """

    batch: Batch
    closes: bool
    reduces: bool
    has_rows: bool = True
    nested: bool = False
    buffers: Mapping[str, torch.Tensor] | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True)
class UpdateSpec:
    """What an update must do before the optimizer runs.

    Attributes:
        scale: Factor for every gradient, a number or scalar tensor; None leaves them unchanged.
        clip_norm: Maximum total norm; None does not clip.
        clip_value: Maximum absolute value of an entry; None does not clip.
        skip: Skip the update; equal on every rank.
        keep_parameters: Count the update but keep this rank's parameters: its replica trains
            independently (`Plan.local`) and had no rows.
        zero: Zero the gradients afterwards.
    """

    scale: torch.Tensor | float | None = attrs.field(default=None, eq=False, repr=number)
    clip_norm: float | None = None
    clip_value: float | None = None
    skip: bool = False
    keep_parameters: bool = False
    zero: bool = True


@attrs.frozen(kw_only=True, eq=False)
class UpdateResult:
    """The result of an update.

    Attributes:
        applied: Whether the optimizers ran.
        grad_norm: Total norm before clipping, if one was computed.
        due: Whether the accumulation window closed, so that there was an update or one was skipped.
    """

    applied: bool
    grad_norm: torch.Tensor | None = attrs.field(default=None, repr=number)
    due: bool = True


@attrs.frozen(kw_only=True, eq=False)
class Round:
    """What replicas that train independently keep from one average to the next.

    Attributes:
        copies: The ranks that hold the same part of each replica.
        within: The ranks of this replica, over which its gradients are averaged.
        peers: Their numbers on the data axis.
        parameters: The averaged parameters, by name; buffers are averaged as well.
        fragments: Names of the parameters that are averaged together.
        rows: On the CPU, int64, shape (fragments, 3): rows of this replica, those of all replicas
            together, and micro-batches with a `Weighted` loss, in the updates since the last
            average of the fragment.
        weight: On the device, shape (fragments,): the weight of this rank's `Weighted` losses in
            them.
        open_rows: Shape (3,): the same as `rows`, for the open accumulation window.
        open_weight: A number: the same as `weight`, for the open accumulation window.
        anchor: Parameters after the last average, by name; only with an outer optimizer.
        momentum: Momentum of the outer optimizer, by name.
        residual: What compression has lost so far, by name; only with compression.
        under_way: By fragment, the average that the replicas compute while they train. It is
            mutable.
    """

    copies: DistContext
    within: DistContext
    peers: tuple[int, ...]
    parameters: Mapping[str, nn.Parameter] = attrs.field(repr=False)
    fragments: tuple[tuple[str, ...], ...] = attrs.field(repr=False)
    rows: torch.Tensor = attrs.field(repr=False)
    weight: torch.Tensor = attrs.field(repr=False)
    open_rows: torch.Tensor = attrs.field(repr=False)
    open_weight: torch.Tensor = attrs.field(repr=False)
    anchor: Mapping[str, torch.Tensor] = attrs.field(factory=dict, repr=False)
    momentum: Mapping[str, torch.Tensor] = attrs.field(factory=dict, repr=False)
    residual: Mapping[str, torch.Tensor] = attrs.field(factory=dict, repr=False)
    under_way: dict[int, Any] = attrs.field(factory=dict, repr=False)

    def sizes(self, batch: Batch) -> tuple[int, ...]:
        """The rows of a batch, including padding, on each rank of this replica."""
        return tuple([batch.sizes[rank] for rank in self.peers])


@attrs.frozen(kw_only=True, eq=False)
class WeightedLoss:
    """One micro-batch's part in its update.

    Attributes:
        loss: The tensor from which backward starts.
        mean: The micro-batch's own mean loss, detached.
        weight: What that mean averages over.
        aux: The loss function's aux metrics.
        provisional: Whether the loss was scaled by an estimate, so that gradients have to be
            corrected by the weight of the window when it closes.
        explicit: Whether the loss function gave the weight (`Weighted`), in place of rows.
    """

    loss: torch.Tensor = attrs.field(repr=number)
    mean: torch.Tensor = attrs.field(repr=number)
    weight: torch.Tensor | float = attrs.field(repr=number)
    aux: Any = attrs.field(default=None, repr=brief)
    provisional: bool = False
    explicit: bool = False


@attrs.frozen(kw_only=True)
class Strategy:
    """How one backend carries out one kind of plan: functions only, no state.

    Every function has the same signature in every backend, and a missing ability is
    `unsupported(...)`, or None in the fields that say so. Change one with
    `attrs.evolve(entry, sync=quiet)`, and pass the entry to `fx.wrap(..., strategy=entry)`: every
    function is called as it has it. No other code depends on which strategy it is, or on the type
    of its config.

    Contract: after `backward` inside `sync` of a micro-batch that reduces, gradients are the mean,
    over the ranks of `ctx.axis("loss")` (those of the data and context axes), of what each rank has
    accumulated since the last `zero`.

    Attributes:
        name: Shown in messages.
        config: The config type that selects this entry.
        check: (ctx, plan, module) → problems, in words; no traffic, equal on all ranks.
        wrap: (entry, module, ctx, plan, optimizer, scheduler) → Wrapped, whose `strategy` is the
            entry.
        forward: (model, args, kwargs) → outputs.
        sync: (model, MicroBatch) → context manager around forward and backward of a micro-batch,
            inside which gradients are reduced over ranks if it `reduces`. `fx.update`, whose
            forward has run before, enters it around backward only.
        backward: (loss, model) → None; applies the loss scale, if any.
        begin: (model) → None: at the beginning of a window, drops gradients that another model's
            backward left in this one.
        run: (model, MicroBatch, compute_loss) → WeightedLoss: forward and backward of one
            micro-batch, after which gradients are reduced over ranks if it `reduces`.
            `compute_loss(model, batch)` calls the user's loss function and weights the result; a
            strategy may call it for parts of the batch, or on some ranks only.
        clip_norm: (model, max_norm, norm_type=2.0, parameters=None) → norm before clipping, equal
            on every rank; a step passes the first two.
        clip_value: (model, max_value) → None.
        scale_grads: (model, factor) → None.
        finite: (model) → whether this rank's gradients are finite, as a bool or as a tensor on any
            device, which the caller reads; no traffic.
        apply: (model, UpdateSpec) → UpdateResult: everything from the end of backward to parameters
            updated, with gradients unscaled, scaled, clipped, and zeroed afterwards.
        state: (model) → ModelState, for a checkpoint; called by all ranks at once.
        load_state: (model, StateReader) → None; restores the model, at any world size.
        weights: (model) → the tensors of the user's module by name, those of its state dict
            first and in its order; the same names on every rank, whichever holds them. No
            traffic.
        unwrap: (model) → the original user's module, with full weights.
        prepare: (action, ctx, plan) → the plan with what files add that its config names, for a
            call such as "wrap", with the same errors on every rank; None where there are none.
        without_batch: (plan) → the plan, whose config leaves the size of batches open.
        take_layers: (module, plan) → undo: before the module is wrapped, gives it the quantized
            layers of the files that its weights come from; None where the module has its weights.
        raises_parameters: (plan) → whether trained parameters in half precision become fp32, which
            optimizers need where forward computes in another dtype.
        outputs_everywhere: (plan) → whether a forward without gradients has outputs on every rank.
        shards: (plan, mesh) → over how many ranks parameters are split, and over how many the
            states of optimizers.
        in_host_memory: (plan) → whether parameters, gradients and states of optimizers are there.
        overlapped: (plan) → the passes, of "forward" and "backward", during which data ranks
            exchange parameters or gradients as well.
        parts: (plan, mesh) → into how many micro-batches a rank splits its batch.
        bubble: (plan, mesh) → the time that a rank waits for other stages, as a share of its
            forward and backward.
        one_rank: Whether it runs on one rank only.
        waits_in_forward: Whether a forward waits for other ranks than those of the context axis.
        grads_in_module: Whether gradients are those of the module's parameters, whole or as
            DTensors, when `apply` is called.
        gathers_weights: Whether layers gather weights before they compute, which can be in float8.
        cuts_sequences: Whether it supports `Plan.context`.
        converts_layers: Whether it supports precision="fp8": it runs the user's module, some
            layers of which were converted before.
        full_parameters: Whether each rank holds full parameters, so that they may be quantized,
            and compared by their digests.
        splits_quantized: Whether it splits quantized weights over ranks, of libraries that
            compute with them.
        updates_on_host: Whether it supports torchao's CPUOffloadOptimizer: its parameters,
            gradients and updates are those of the module.
        generate: (model, method, args, kwargs) → what the `generate` of the user's module returns,
            which all ranks call together; None where they cannot, or need not.
        verify: (model) → None: compares the replicas of all ranks (`Plan.verify_replicas`), after
            an update; None where the parameters of the module or the states of its optimizers are
            not in memory, or shards are not DTensors.
        average: (model, position) → None: with independent replicas (`Plan.local`), ends the
            round that ends at a position, or begins the first; at None ends one. None where
            replicas cannot train independently.
        fused: (name, function) of functions of this entry that its own `run` or `apply` never
            calls, since an engine combines their work. `fx.wrap` refuses an entry in which one
            of them was changed and `fused` was not.
    """

    name: str
    config: type
    check: Callable[[DistContext, Plan, nn.Module], tuple[str, ...]]
    wrap: Callable[[Strategy, nn.Module, DistContext, Plan, Any, Any], Wrapped]
    forward: Callable[[Wrapped, tuple[Any, ...], dict[str, Any]], Any]
    sync: Callable[[Wrapped, MicroBatch], AbstractContextManager[None]]
    backward: Callable[[torch.Tensor, Wrapped], None]
    begin: Callable[[Wrapped], None]
    run: Callable[[Wrapped, MicroBatch, Callable[[Wrapped, Batch], WeightedLoss]], WeightedLoss]
    clip_norm: Callable[..., torch.Tensor]
    clip_value: Callable[[Wrapped, float], None]
    scale_grads: Callable[[Wrapped, torch.Tensor | float], None]
    finite: Callable[[Wrapped], bool | torch.Tensor]
    apply: Callable[[Wrapped, UpdateSpec], UpdateResult]
    state: Callable[[Wrapped], ModelState]
    load_state: Callable[[Wrapped, StateReader], None]
    weights: Callable[[Wrapped], dict[str, Weight]]
    unwrap: Callable[[Wrapped], nn.Module]
    prepare: Callable[[str, DistContext, Plan], Plan] | None = None
    without_batch: Callable[[Plan], Plan] = lambda plan: plan
    take_layers: Callable[[nn.Module, Plan], Callable[[], None]] | None = None
    raises_parameters: Callable[[Plan], bool] = lambda plan: plan.precision.compute != "fp32"
    outputs_everywhere: Callable[[Plan], bool] = lambda _: True
    shards: Callable[[Plan, Mesh], tuple[int, int]] = lambda _, __: (1, 1)
    in_host_memory: Callable[[Plan], bool] = lambda _: False
    overlapped: Callable[[Plan], tuple[str, ...]] = lambda _: ()
    parts: Callable[[Plan, Mesh], int] = lambda _, __: 1
    bubble: Callable[[Plan, Mesh], float] = lambda _, __: 0.0
    one_rank: bool = False
    waits_in_forward: bool = True
    grads_in_module: bool = False
    gathers_weights: bool = False
    cuts_sequences: bool = False
    converts_layers: bool = False
    full_parameters: bool = False
    splits_quantized: bool = False
    updates_on_host: bool = False
    generate: Callable[[Wrapped, Callable[..., Any], Any, Any], Any] | None = None
    verify: Callable[[Wrapped], None] | None = None
    average: Callable[[Wrapped, Position | None], None] | None = None
    fused: tuple[tuple[str, Callable[..., Any]], ...] = ()


def unsupported(what: str, *, by: str) -> Callable[..., NoReturn]:
    """A strategy function that raises, because the backend does not support it.

    Example:
        >>> from fxtrain.state import unsupported
        >>> unsupported("clip_value", by="XLA")()
        Traceback (most recent call last):
        fxtrain.errors.PlanError: XLA does not support clip_value. [FX202]
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PlanError(f"{by} does not support {what}.", code="FX202")

    return refuse
