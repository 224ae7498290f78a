"""Whether a launch and a plan would be accepted, without ranks and without the user's model."""

import math
from typing import Any

import attrs
import torch
from torch import nn

from fxtrain.backends.wrapping import problems_of
from fxtrain.errors import FxError, LaunchError, MissingPackageError
from fxtrain.launchers import LaunchSpec, prepare
from fxtrain.launchers.config import LaunchConfig
from fxtrain.launchers.machine import default_ranks
from fxtrain.launchers.program import OWN_RANKS
from fxtrain.state import DistContext, Mesh, Plan
from fxtrain.state.context import simulated
from fxtrain.state.mesh import resolve_mesh
from fxtrain.state.registry import strategy_of

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
        alone = strategy_of(plan.strategy).one_rank
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
    strategy = strategy_of(plan.strategy)
    if strategy.prepare is not None:
        plan = strategy.prepare("wrap", ctx, plan)
    plan = without_names(plan)
    # Experts that any number of ranks can share evenly; not every plan takes a model that has some.
    models = (stand_in(ctx.mesh), stand_in(ctx.mesh, experts=ctx.world_size**2))
    return min((problems_of(strategy, ctx, plan, model) for model in models), key=len)


def without_names(plan: Plan) -> Plan:
    """A plan without what names classes, modules and tensors of the user's model."""
    return _nameless(plan)


def _nameless(value: Any) -> Any:
    """A record whose fields for parts of a model have their defaults, and those of its records."""
    if not attrs.has(type(value)):
        return value
    fields = [field for field in attrs.fields(type(value)) if field.init]
    kept = {field.name: _nameless(getattr(value, field.name)) for field in fields}
    named = {field.name: field.default for field in fields if field.metadata.get("of_model")}
    return attrs.evolve(value, **{**kept, **named})


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
