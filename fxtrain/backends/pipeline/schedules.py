"""The stages that a rank runs, and torch's schedules over them."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from fxtrain import _tree, ops
from fxtrain._errors import FxError, PlanError
from fxtrain.backends.pipeline.partition import Layout, fitting_kind
from fxtrain.backends.pipeline.sharded_stages import reshard_stage
from fxtrain.backends.pipeline.stage import Call, Probe, Stage, TensorMeta, probe
from fxtrain.backends.pipeline.weights import TensorSlot
from fxtrain.state import PP, DistContext, Wrapped

__all__ = ["Pipeline", "PreparedSchedule", "prepare"]

_MAX_SCHEDULES = 8  # schedules, each with buffers for what it receives

StageTask = Callable[[Stage, tuple[Tensor, ...], int], Any]


@attrs.frozen(eq=False)
class PreparedSchedule:
    """A schedule for arguments of one kind.

    Attributes:
        schedule: torch's.
        parts: Micro-batches that it runs.
        sends: By stage, what it gives to the next one.
        form: What the last stage told the others of its results; empty until it did.
    """

    schedule: Any
    parts: int
    sends: Mapping[int, tuple[TensorMeta, ...]]
    form: list[Any] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class Pipeline:
    """What runs a wrapped model's forward and backward: this rank's stages of it.

    Attributes:
        module: The user's, with this rank's parameters only.
        layout: Over all ranks of the pipeline.
        axis: Those ranks.
        stages: Of this rank, by number.
        fake_stages: The same without values, of those that are sharded: what is found out of one
            rank's stage alone gathers nothing. In a pretended world also of the other ranks'
            stages.
        shared_groups: (group, names) of parameters that several ranks hold, whose gradients are
            summed.
        places: Where parameters and buffers of the whole model stand.
        schedules: Schedules by the kind of their arguments, the latest last.
    """

    module: nn.Module = attrs.field(repr=False)
    layout: Layout
    axis: DistContext = attrs.field(repr=False)
    stages: dict[int, Stage] = attrs.field(repr=False)
    fake_stages: dict[int, Stage] = attrs.field(repr=False)
    shared_groups: tuple[tuple[Any, tuple[str, ...]], ...] = attrs.field(default=(), repr=False)
    places: tuple[TensorSlot, ...] = attrs.field(default=(), repr=False)
    schedules: dict[Any, PreparedSchedule] = attrs.field(factory=dict, repr=False)

    @property
    def source(self) -> int:
        """The rank of the last stage."""
        return self.layout.ranks[-1]

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
        index = torch.arange(ready.parts)
        with self._working(job):
            kwargs = {} if ready.schedule._loss_fn is None else {"target": index}
            try:
                ready.schedule.step(index=index, return_outputs=False, **kwargs)
            except RuntimeError as error:  # torch's own words around an error
                if isinstance(error.__cause__, FxError):
                    raise error.__cause__ from None
                raise
        for stage in self.stages.values():
            reshard_stage(stage)

    @contextmanager
    def _working(self, job: StageTask) -> Iterator[None]:
        before = {number: stage.job for number, stage in self.stages.items()}
        for stage in self.stages.values():
            stage.job = job
        try:
            yield
        finally:
            for number, stage in self.stages.items():
                stage.job = before[number]


def prepare(model: Wrapped, calls: Sequence[Call], *, train: bool) -> PreparedSchedule:
    """The schedule for micro-batches with arguments like the first of these.

    Effects:
        The first time, the stages tell each other what they need, in one exchange of objects.

    Raises:
        PlanError: the model cannot be split so; on every rank of the pipeline.
    """
    engine: Pipeline = model.engine
    leaves, shape = _tree.flatten(calls[0])
    key = (train, len(calls), engine.module.training, shape.text, *map(_kind, leaves))
    if key not in engine.schedules:
        ready = _prepared(model, calls, train=train)
        while len(engine.schedules) >= _MAX_SCHEDULES:
            engine.schedules.pop(next(iter(engine.schedules)))
        engine.schedules[key] = ready
    return engine.schedules[key]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype, leaf.requires_grad)
    return leaf if isinstance(leaf, bool | int | float | str) else type(leaf)


def _infer_shapes(model: Wrapped, calls: Sequence[Call]) -> dict[int, Probe]:
    """What the stages that this rank knows of need and give.

    With the very first batch, all its micro-batches are looked at: what they send must be alike.
    """
    engine: Pipeline = model.engine
    known = {**engine.stages, **engine.fake_stages}
    with ops.autocast(model):
        found = {number: probe(one, calls[0], model.ctx) for number, one in known.items()}
        if engine.schedules or model.ctx.comm.simulated:
            return found
        # Not the first stage, which needs nothing: what it would do here it would do for real.
        for number in found.keys() - {0}:
            others = [probe(known[number], call, model.ctx) for call in calls[1:]]
            found[number] = _common_probe(found[number], others)
    return found


def _common_probe(first: Probe, others: Sequence[Probe]) -> Probe:
    """What was found with the first micro-batch, with a problem if others need something else."""
    other = next((one for one in others if one.needs != first.needs), None)
    if first.problem is not None or other is None:
        return first
    shapes = [[list(meta.shape) for meta in one.needs] for one in (first, other)]
    text = (
        f"micro-batches send it {shapes[0]} and {shapes[1]}, shapes that depend on data. All need "
        f"the same: cut or pad in the loss function, before the model is called"
    )
    return attrs.evolve(first, problem=other.problem or text)


def _prepared(model: Wrapped, calls: Sequence[Call], *, train: bool) -> PreparedSchedule:
    engine: Pipeline = model.engine
    parts, probes = len(calls), _infer_shapes(model, calls)
    mine = {number: probes[number] for number in engine.stages}
    for found in ops.gather_objects(mine, engine.axis):
        probes.update(found)
    if problems := _problems(engine, probes):
        raise PlanError("\n".join(problems))
    count = len(engine.layout.ranks)
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
        stage.stage_index_to_group_rank = dict(enumerate(engine.layout.ranks))
        vote = getattr(stage, "_warmup_backward_result", None)  # of newer versions of torch
        if vote is not None and model.ctx.comm.simulated:
            stage._warmup_backward_result = functools.partial(_all_stages_ready, vote)
    return PreparedSchedule(
        schedule=_schedule(model, stages, parts, train=train), parts=parts, sends=sends
    )


def _all_stages_ready(vote: Callable[..., Tensor], received_result: Tensor | None) -> Tensor:
    """A pretended world's answer to whether every stage knows its shapes: there a 0 arrives."""
    return torch.ones_like(vote(received_result))


def _schedule(model: Wrapped, stages: list[Any], parts: int, *, train: bool) -> Any:
    config: PP = model.plan.strategy
    kind = fitting_kind(config, len(set(model.engine.layout.ranks)), parts)
    one = kind.stages == (1, 1)
    if not train:
        made = torch_schedules.ScheduleGPipe if one else _ForwardSchedule
        return made(stages[0] if one else stages, n_microbatches=parts)  # type: ignore[arg-type]
    return getattr(torch_schedules, kind.name)(
        stages[0] if one else stages,
        n_microbatches=parts,
        loss_fn=_first,  # the last stage's output is the loss already, weighed
        scale_grads=False,
    )


class _StaticShapeStage(pipelining.PipelineStage):
    """A stage whose shapes are given, so that torch has nothing to try out."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Keep the gradients of an open window, which torch takes for those of its trial."""


class _ForwardSchedule(torch_schedules._PipelineScheduleRuntime):
    """Forward alone over several stages a rank, stage by stage, in a loop or there and back.

    torch's own schedules of those take the number of micro-batches of training only, or hand
    gradients on even where there are none.
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
        self.pipeline_order_with_comms = torch_schedules._add_send_recv(
            whole, stage_to_rank=owners.__getitem__, num_stages=self._num_stages
        )
        for stage in stages:
            stage.stage_index_to_group_rank = owners


def _first(output: Any, _: Any) -> Any:
    return output


def _problems(engine: Pipeline, probes: Mapping[int, Probe]) -> list[str]:
    """Why stages do not fit together, the same on every rank of the pipeline."""
    name = type(engine.module).__name__
    problems: list[str] = []
    for number, found in sorted(probes.items()):
        text = found.problem
        before = probes[number - 1].gives if number else ()
        if text is None and any(
            meta.index >= len(before) or before[meta.index] != "own" for meta in found.needs
        ):
            text = (
                "it needs a value that neither it nor the stage before has computed. Only the "
                "arguments of a stage's first module go from one stage to the next"
            )
        if text is None and number == len(engine.layout.ranks) - 1 and "other" in found.gives:
            text = (
                "the outputs need a value of an earlier stage which is no argument of this "
                "stage's first module, or a parameter of a module that is registered before the "
                "blocks and runs after them: name it in PP(shared=...)"
            )
        if text is not None:
            where = f"before {engine.layout.starts[number - 1]}" if number else "at its beginning"
            problems.append(f"PP cannot split {name} {where}, where stage {number} begins: {text}.")
    return problems
