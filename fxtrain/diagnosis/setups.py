"""Whether a launch and a plan would be accepted, without ranks and without the user's model."""

import math

import attrs
import torch
from torch import nn

from fxtrain.backends.deepspeed.config import config_problems, resolve_deepspeed
from fxtrain.backends.wrapping import problems_of, strategies
from fxtrain.errors import FxError, LaunchError, MissingPackageError, PlanError
from fxtrain.launchers import LaunchSpec, prepare
from fxtrain.launchers.config import LaunchConfig
from fxtrain.launchers.machine import default_ranks
from fxtrain.launchers.program import OWN_RANKS
from fxtrain.state import (
    FSDP,
    PP,
    TP,
    XLA,
    DeepSpeed,
    DistContext,
    Mesh,
    Offload,
    Plan,
    Single,
)
from fxtrain.state.context import simulated
from fxtrain.state.deepspeed import fill_from_config, read_config
from fxtrain.state.mesh import resolve_mesh

_CHIPS = 4  # of a TPU host, where the mesh leaves it open
_WIDTH = 256


def launch_file_problems(config: LaunchConfig) -> tuple[str, ...]:
    """Why `fxtrain launch --dry` would not start this launch, or `fx.wrap` refuse its plan.

    What depends on the model is not checked: classes and names of modules, sizes of layers. Nor is
    a strategy whose package is not installed here. Inspects this machine as `--dry` does.
    """
    spec, plan = config.launch, config.plan
    if "ranks" not in config.values["launch"]:
        spec = attrs.evolve(spec, ranks=default_ranks(spec))
    try:
        prepare(spec)
    except LaunchError as error:
        return (f"launch: {error.message}",)
    try:
        problems = plan_problems(planned_context(spec, plan), plan)
    except MissingPackageError:
        return ()
    except FxError as error:
        problems = tuple(error.message.splitlines())
    return tuple(f"plan: {problem}" for problem in problems)


def planned_context(spec: LaunchSpec, plan: Plan) -> DistContext:
    """The context of rank 0 of a launch, without process groups."""
    tpu = spec.launcher.startswith("tpu")
    asked = Mesh() if plan.mesh is None else plan.mesh
    count = spec.world_size
    if spec.launcher in OWN_RANKS or spec.min_nodes is not None:
        alone = isinstance(plan.strategy, Single)
        open_axis = -1 in asked.sizes.values() and not alone
        count = math.prod(size for size in asked.sizes.values() if size > 0)
        count *= (_CHIPS if tpu else 2 * spec.nodes) if open_axis else 1
    mesh = resolve_mesh(asked, count)
    kind = "xla" if tpu else "cpu" if spec.cpu else "cuda"
    ctx = DistContext(
        world_size=1 if tpu else count,
        local_world_size=1 if tpu else spec.ranks,
        num_nodes=spec.nodes,
        device=torch.device(kind),
        mesh=mesh,
        devices=count if tpu else 1,
    )
    return simulated(ctx)


def plan_problems(ctx: DistContext, plan: Plan) -> tuple[str, ...]:
    """What `fx.wrap` would refuse of a plan in a context, except for what depends on the model."""
    entry = strategies().get(type(plan.strategy))
    if entry is None:
        raise PlanError(f"No strategy is registered for {type(plan.strategy).__name__}.")
    if isinstance(plan.strategy, DeepSpeed):
        ranks = ctx.axis("data").world_size
        base = read_config(plan.strategy)
        plan = fill_from_config(plan, base, ranks)
        base = {name: base[name] for name in base if name not in ("optimizer", "scheduler")}
        config = resolve_deepspeed(plan, base, ranks=ranks, partial=True)
        if problems := config_problems(config, ranks):
            return problems
    config = plan.strategy.stages if isinstance(plan.strategy, PP) else plan.strategy
    spread = config.expert if isinstance(config, FSDP) else None
    model = stand_in(ctx.mesh, experts=(spread or 0) * ctx.world_size)
    return problems_of(entry, ctx, without_names(plan), model)


def without_names(plan: Plan) -> Plan:
    """A plan without names of classes, modules and tensors, which belong to the user's model."""
    compiled = None if plan.compile is None else attrs.evolve(plan.compile, blocks=())
    plan = attrs.evolve(plan, recompute=(), recompute_every=1, recompute_keep=(), compile=compiled)
    if plan.context is not None:
        plan = attrs.evolve(plan, context=attrs.evolve(plan.context, tables=()))
    return attrs.evolve(plan, strategy=_nameless(plan.strategy))


def _nameless(config: object) -> object:
    if isinstance(config, FSDP):
        tensor = None if config.tensor is None else TP(sequence=config.tensor.sequence)
        names = {"wrap": (), "wrap_by": None, "min_params": None, "ignore": ()}
        return attrs.evolve(config, **names, tensor=tensor)
    if isinstance(config, PP):
        stages = None if config.stages is None else _nameless(config.stages)
        return attrs.evolve(config, stages=stages, split=(), shared=())
    if isinstance(config, DeepSpeed):
        return attrs.evolve(config, leaf_modules=())
    if isinstance(config, XLA):
        return attrs.evolve(config, blocks=())
    return Offload() if isinstance(config, Offload) else config


class _Experts(nn.Module):
    """The form of a mixture of experts; see `is_mixture`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.empty(count, _WIDTH, device="meta"))

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Not called: only its arguments are read."""


def stand_in(mesh: Mesh, experts: int = 0) -> nn.Module:
    """A model that any ranks can split: blocks of wide layers, as Llama's, and of these experts."""
    width = _WIDTH * mesh.tensor

    def block() -> nn.Module:
        layers = {name: nn.Linear(width, width) for name in ("up_proj", "down_proj")}
        return nn.ModuleDict(layers | ({"experts": _Experts(experts)} if experts else {}))

    with torch.device("meta"):
        return nn.ModuleDict({"layers": nn.ModuleList(block() for _ in range(8 * mesh.pipeline))})
