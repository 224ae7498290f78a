"""The stages that a rank runs, and torch's schedules over them."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from fxtrain import _tree, ops
from fxtrain.backends.pipeline.partition import Partition, fitting_kind
from fxtrain.backends.pipeline.stage import (
    Call,
    Probe,
    Stage,
    TensorMeta,
    leaf_kind,
    probe,
    reshard_stage,
)
from fxtrain.backends.pipeline.weights import TensorSlot
from fxtrain.errors import PlanError
from fxtrain.state import PP, DistContext, Wrapped

_MAX_SCHEDULES = 8  # cached schedules, each with receive buffers

StageTask = Callable[[Stage, tuple[Tensor, ...], int], Any]


@attrs.define(eq=False)
class PreparedSchedule:
    """A schedule for arguments of one kind; mutable, since `form` is known after its first run.

    Attributes:
        schedule: torch's.
        trains: Whether it runs backward as well.
        parts: Number of its micro-batches.
        sends: By stage, what it sends to the next one.
        form: The last stage's description of its results; None until it is broadcast.
    """

    schedule: Any
    trains: bool
    parts: int
    sends: Mapping[int, tuple[TensorMeta, ...]]
    form: Any = None


@attrs.frozen(eq=False)
class Pipeline:
    """Runs a wrapped model's forward and backward: this rank's stages of it.

    Attributes:
        module: The user's, with this rank's parameters only.
        partition: The whole pipeline's.
        axis: The ranks of the pipeline.
        stages: This rank's stages, by number.
        fake_stages: The same without values, for sharded stages: finding the shapes of one rank's
            stage must not gather. In a simulated world also the other ranks' stages.
        shared_groups: (group, names) of parameters that several ranks hold, whose gradients are
            summed.
        places: Names of parameters and buffers in the whole model.
        schedules: Schedules by the kind of their arguments, the latest last.
    """

    module: nn.Module = attrs.field(repr=False)
    partition: Partition
    axis: DistContext = attrs.field(repr=False)
    stages: dict[int, Stage] = attrs.field(repr=False)
    fake_stages: dict[int, Stage] = attrs.field(repr=False)
    shared_groups: tuple[tuple[Any, tuple[str, ...]], ...] = attrs.field(default=(), repr=False)
    places: tuple[TensorSlot, ...] = attrs.field(default=(), repr=False)
    schedules: dict[Any, PreparedSchedule] = attrs.field(factory=dict, repr=False)

    @property
    def source(self) -> int:
        """The rank of the last stage."""
        return self.partition.ranks[-1]

    def train(self, mode: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch's
        """Put the module and its stages into training mode, or out of it."""
        for part in (self.module, *self.stages.values(), *self.fake_stages.values()):
            part.train(mode)

    def eval(self) -> None:
        """Put the module and its stages into evaluation mode."""
        self.train(mode=False)

    def modules(self) -> Iterator[nn.Module]:
        """Every module that `train` and `eval` switch."""
        yield from self.module.modules()
        for stage in (*self.stages.values(), *self.fake_stages.values()):
            yield from (*stage.modules(), *stage.shell.modules())

    def run(self, ready: PreparedSchedule, job: StageTask) -> None:
        """Run a job on every micro-batch of every stage of this rank, in the schedule's order."""
        # torch splits its inputs into micro-batches along dimension 0. It gets the numbers of the
        # micro-batches, since their arguments are any trees, which the job finds by number.
        index = torch.arange(ready.parts, device="cpu")
        kwargs = {"target": index} if ready.trains else {}
        failure: BaseException | None = None
        for stage in self.stages.values():
            stage.job = job
        try:
            ready.schedule.step(index=index, return_outputs=False, **kwargs)
        except RuntimeError as error:  # torch wraps those of a forward
            if "failed to run forward" not in str(error):
                raise
            # The model's own error, which callers may catch by its class.
            failure = error.__cause__
        finally:
            for stage in self.stages.values():
                stage.job = None
        if failure is not None:
            raise failure
        for stage in self.stages.values():
            reshard_stage(stage)


def prepare_schedule(model: Wrapped, calls: Sequence[Call], *, train: bool) -> PreparedSchedule:
    """The schedule for micro-batches with arguments like the first of these.

    Effects:
        The first time, the stages exchange what they need, as objects.

    Raises:
        PlanError: the model cannot be split here; on every rank of the pipeline.
    """
    engine: Pipeline = model.engine
    leaves, shape = _tree.flatten(calls[0])
    key = (train, len(calls), engine.module.training, shape.text, *map(leaf_kind, leaves))
    if key not in engine.schedules:
        ready = _prepared(model, calls, train=train)
        while len(engine.schedules) >= _MAX_SCHEDULES:
            engine.schedules.pop(next(iter(engine.schedules)))
        engine.schedules[key] = ready
    return engine.schedules[key]


def _infer_shapes(model: Wrapped, calls: Sequence[Call]) -> dict[int, Probe]:
    """The inputs and outputs of the stages that this rank knows.

    For the very first batch, all micro-batches are probed: they must send the same shapes.
    """
    engine: Pipeline = model.engine
    known = {**engine.stages, **engine.fake_stages}
    with ops.autocast(model):
        probes = {number: probe(stage, calls[0], model.ctx) for number, stage in known.items()}
        if engine.schedules or model.ctx.comm.simulated:
            return probes
        # Not for the first stage: it has no inputs to find, and would compute for real.
        for number in probes.keys() - {0}:
            others = [probe(known[number], call, model.ctx) for call in calls[1:]]
            probes[number] = _common_probe(probes[number], others)
    return probes


def _common_probe(first: Probe, others: Sequence[Probe]) -> Probe:
    """The result for the first micro-batch, with a problem if others have different shapes."""
    other = next((each for each in others if each.needs != first.needs), None)
    if first.problem is not None or other is None:
        return first
    shapes = [[list(meta.shape) for meta in each.needs] for each in (first, other)]
    text = (
        f"micro-batches send it {shapes[0]} and {shapes[1]}, so shapes depend on data. All must be "
        f"equal: truncate or pad in the loss function, before the model is called"
    )
    return attrs.evolve(first, problem=other.problem or text)


def _prepared(model: Wrapped, calls: Sequence[Call], *, train: bool) -> PreparedSchedule:
    engine: Pipeline = model.engine
    parts, probes = len(calls), _infer_shapes(model, calls)
    local = {number: probes[number] for number in engine.stages}
    for theirs in ops.gather_objects(local, engine.axis):
        probes.update(theirs)
    if problems := _problems(engine, probes):
        raise PlanError("\n".join(problems))
    count = len(engine.partition.ranks)
    sends = {number: probes[number + 1].needs for number in range(count - 1)}
    stages: list[Any] = [
        _StaticShapeStage(
            submodule=stage,
            stage_index=number,
            num_stages=count,
            device=model.ctx.device,
            input_args=tuple(meta.example() for meta in probes[number].needs),
            output_args=tuple(meta.example() for meta in sends.get(number, ()))
            or torch.empty((), device="meta"),
            group=engine.axis.comm.group,
        )
        for number, stage in engine.stages.items()
    ]
    for stage in stages:
        stage.stage_index_to_group_rank = dict(enumerate(engine.partition.ranks))
        vote = getattr(stage, "_warmup_backward_result", None)  # in torch 2.13, not in 2.15
        if vote is not None and model.ctx.comm.simulated:
            stage._warmup_backward_result = functools.partial(_all_stages_ready, vote)
    return PreparedSchedule(
        schedule=_schedule(model, stages, parts, train=train),
        trains=train,
        parts=parts,
        sends=sends,
    )


def _all_stages_ready(vote: Callable[..., Tensor], received_result: Tensor | None) -> Tensor:
    """Whether every stage knows its shapes, as a simulated world answers: a 0 arrives there."""
    return torch.ones_like(vote(received_result))


def _schedule(model: Wrapped, stages: list[Any], parts: int, *, train: bool) -> Any:
    config: PP = model.plan.strategy
    kind = fitting_kind(config, len(set(model.engine.partition.ranks)), parts)
    is_single = kind.stages == (1, 1)
    if not train:
        if not is_single:
            return _ForwardSchedule(stages, n_microbatches=parts)
        # Gradients are those of an open window, also where torch scales them after a forward.
        return torch_schedules.ScheduleGPipe(stages[0], n_microbatches=parts, scale_grads=False)
    return getattr(torch_schedules, kind.name)(
        stages[0] if is_single else stages,
        n_microbatches=parts,
        loss_fn=lambda output, _: output,  # the last stage's is already the weighted loss
        scale_grads=False,
    )


class _StaticShapeStage(pipelining.PipelineStage):
    """A stage whose shapes are given, so that torch does not infer them."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep the gradients of an open window, which torch takes for those of its inference."""


class _ForwardSchedule(torch_schedules._PipelineScheduleRuntime):
    """Forward only over several stages per rank, stage by stage, in a loop or there and back.

    torch's schedules for those accept only the number of micro-batches used in training, or send
    gradients even where there are none.
    """

    def __init__(self, stages: list[Any], n_microbatches: int) -> None:
        owners: dict[int, int] = stages[0].stage_index_to_group_rank
        super().__init__(stages=stages, n_microbatches=n_microbatches)
        self.stage_index_to_group_rank = owners
        forward = torch_schedules._ComputationType.FORWARD
        self.pipeline_order: dict[int, list[Any]] = {
            rank: [
                torch_schedules._Action(stage, forward, part)
                for stage, owner in owners.items()
                if owner == rank
                for part in range(n_microbatches)
            ]
            for rank in range(self.pp_group_size)
        }
        whole: dict[int, list[Any]] = {
            rank: torch_schedules._add_unshard_reshard(actions)
            for rank, actions in self.pipeline_order.items()
        }
        # Since torch 2.15, every send needs a wait.
        add_waits = getattr(torch_schedules, "_add_wait_send", lambda actions: actions)
        self.pipeline_order_with_comms = add_waits(
            torch_schedules._add_send_recv(
                whole, stage_to_rank=owners.__getitem__, num_stages=len(owners)
            )
        )
        for stage in stages:
            stage.stage_index_to_group_rank = owners


def _problems(engine: Pipeline, probes: Mapping[int, Probe]) -> list[str]:
    """Why stages do not fit together; the same on every rank of the pipeline."""
    name = type(engine.module).__name__
    problems: list[str] = []
    for number, stage_probe in sorted(probes.items()):
        text = stage_probe.problem
        before = probes[number - 1].gives if number else ()
        if text is None and any(
            meta.index >= len(before) or before[meta.index] != "own" for meta in stage_probe.needs
        ):
            text = (
                "it needs a value that neither it nor the previous stage has computed. Only the "
                "arguments of a stage's first module are sent from one stage to the next"
            )
        if (
            text is None
            and number == len(engine.partition.ranks) - 1
            and "other" in stage_probe.gives
        ):
            text = (
                "the outputs need a value of an earlier stage that is not an argument of this "
                "stage's first module, or a parameter of a module that is registered before the "
                "blocks and runs after them: name it in PP(shared=...)"
            )
        if text is not None:
            where = (
                f"before {engine.partition.starts[number - 1]}" if number else "at its first module"
            )
            problems.append(f"PP cannot split {name} {where}, the start of stage {number}: {text}.")
    return problems
