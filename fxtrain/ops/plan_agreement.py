"""Comparing plans and other arguments between ranks."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from fxtrain.errors import CollectiveError, FxError, PlanError
from fxtrain.ops.logs import log
from fxtrain.ops.objects import agree, gather_objects
from fxtrain.ops.transport.mismatches import by_rank
from fxtrain.state import DDP, DistContext, Plan, Strategy, diff, fingerprint
from fxtrain.state.registry import registered

_DEFAULT = Plan()  # one object, so that a step finds by identity that plans are equal


class LoggedPlans(set[Plan]):
    """Plans of a context whose difference was logged: from the launch's, or from their config."""


def plan_for(
    action: str, ctx: DistContext, plan: Plan | None, strategy: Strategy | None = None
) -> Plan:
    """The plan of a call: the script's, else the one that came with the launch, else the default.

    Where the script's plan overrides fields that the launch sets, the main rank logs once which.
    The strategy, by default that of the plan's config, adds what files have that the config names.
    """
    launched = ctx.given_plan
    plan = _followed(action, ctx, plan, launched)
    strategy = registered(type(plan.strategy)) if strategy is None else strategy
    if strategy is None or strategy.prepare is None:
        return plan
    return strategy.prepare(action, ctx, plan)


def _followed(action: str, ctx: DistContext, plan: Plan | None, launched: Plan | None) -> Plan:
    if plan is None:
        return launched or _DEFAULT
    if launched is not None and plan != launched and plan not in ctx.comm.slot(LoggedPlans):
        ctx.comm.slot(LoggedPlans).add(plan)
        if changes := plan_changes(launched, plan, fields=_binding(ctx, plan)):
            log(ctx, "fxtrain.plan").warning(
                "The plan that the script passes to fx.%s overrides what the launch sets: %s. To "
                "follow the launch, leave the plan out, or pass fx.given_plan(plan), which takes "
                "these fields from the launch and the others from the script.",
                *(action, changes),
            )
    return plan


def _binding(ctx: DistContext, plan: Plan) -> tuple[str, ...]:
    """The fields that the launch sets; a plan without a mesh takes any mesh."""
    free = "mesh" if plan.mesh is None else ""
    return tuple(path for path in ctx.given_fields if path.partition(".")[0] != free)


def agree_on_plan(
    action: str,
    ctx: DistContext,
    plan: Plan,
    extra: Mapping[str, Any] = MappingProxyType({}),
    cures: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that every rank passes the same plan, and the same extra values as text, by name.

    `cures` say what to do where the ranks differ in a value; by default, to pass the same.

    One exchange of packets, and the plans are gathered if they differ; none at one rank or with
    `checks=False`.
    """
    if ctx.world_size == 1:
        return
    facts = {name: str(value) for name, value in extra.items()}
    agree(
        (_fingerprint(plan), facts),
        ctx,
        name=action,
        explain=lambda: _difference(action, gather_objects((plan, facts), ctx), cures),
    )


def _fingerprint(plan: Plan) -> str:
    try:
        return fingerprint(plan)
    except PlanError:  # a third party's config that contains more than data, such as a function
        kind = type(plan.strategy)
        rest = fingerprint(attrs.evolve(plan, strategy=DDP()))
        return f"{kind.__module__}.{kind.__qualname__} {rest}"


def _difference(
    action: str, of_ranks: Sequence[tuple[Plan, Mapping[str, str]]], cures: Mapping[str, str]
) -> FxError:
    """The error that shows how the plans of the ranks differ, or else their extra values."""
    first, facts = of_ranks[0]
    changes = {rank: plan_changes(first, other) for rank, (other, _) in enumerate(of_ranks)}
    lines = by_rank((rank, text) for rank, text in changes.items() if text)
    if lines:
        lines = [
            f"{action}: the ranks pass different plans. Compared with rank 0:",
            *lines,
            "Pass the same plan on every rank: read it from one file, and do not set fields by "
            "rank.",
        ]
        return PlanError("\n".join(lines))
    names = [name for name in facts if len({others[name] for _, others in of_ranks}) > 1]
    shown = [", ".join(f"{name}: {facts[name]}" for name in names) for _, facts in of_ranks]
    lines = [
        f"{action}: the ranks differ in {' and '.join(names)}.",
        *by_rank(enumerate(shown)),
        next(
            (cures[name] for name in names if name in cures),
            f"Every rank must pass the same {' and the same '.join(names)}.",
        ),
    ]
    return CollectiveError("\n".join(lines), code="FX301")


def plan_changes(first: Plan, other: Plan, *, fields: Sequence[str] = ("",)) -> str:
    """How a plan differs from another one; only in these fields, such as `strategy.shard`."""
    return ", ".join(
        f"{change.path} is {change.right!r} instead of {change.left!r}"
        for change in diff(first, other)
        if any(_overlap(change.path, field) for field in fields)
    )


def _overlap(path: str, field: str) -> bool:
    """Whether one is the other, or a field of its table; an empty field is every field."""
    return not field or f"{path}.".startswith(f"{field}.") or f"{field}.".startswith(f"{path}.")
