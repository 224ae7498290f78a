"""Laws that hold for every strategy: the results of a run do not depend on its parallelism.

A law is a function of a pool of ranks, a plan, a mesh and terms that raises AssertionError. The
reference is a plain torch loop in the calling process, over the same rows in one batch.
"""

import functools
import math
import tempfile
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

from fxtrain.backends import strategies, unwrap, weights, wrap
from fxtrain.backends.wrapping import problems_of
from fxtrain.checkpoint import restore
from fxtrain.state import DistContext, LocalSGD, LossScale, Mesh, Plan, Precision, Strategy
from fxtrain.state.mesh import resolve_mesh
from fxtrain.testing.cluster import Cluster
from fxtrain.testing.training import (
    Run,
    Task,
    backward_once,
    new_model,
    on_mesh,
    on_ranks,
    one_batch,
    reference,
    sgd,
    stopped_and_resumed,
    token_rows,
    trained,
)

Law = Callable[..., None]


@attrs.frozen(kw_only=True)
class Terms:
    """Tolerances and features of a strategy whose engine supports less than torch.

    Attributes:
        dtype: Dtype of the model, for laws that do not choose one.
        rtol: Largest relative difference from the reference.
        atol: Largest absolute difference of parameters.
        clip_value: Whether it supports clipping by value.
        fp16: Whether it supports loss scaling on the pool's device.
        exact: Whether one rank equals the reference bit for bit, and not only within tolerances.

    Example:
        >>> import torch
        >>> from fxtrain.testing import Terms
        >>> Terms(dtype=torch.float32, rtol=1e-4, atol=1e-5, clip_value=False).fp16
        True
    """

    dtype: torch.dtype = torch.float64
    rtol: float = 1e-9
    atol: float = 1e-11
    clip_value: bool = True
    fp16: bool = True
    exact: bool = True


_TERMS = Terms()


def same_as_one_process(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """Losses and parameters of several updates equal those of one process."""
    _agrees(ranks, Task(plan=plan, mesh=mesh), terms)


def same_in_micro_batches(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """Several micro-batches give the update of one batch, with and without `sync_each`."""
    for sync_each in (False, True):
        several = attrs.evolve(plan, accumulate=3, sync_each=sync_each)
        _agrees(ranks, Task(plan=several, mesh=mesh), terms)


def same_by_tokens(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """A mean over tokens does not depend on how many a rank or micro-batch has."""
    for accumulate in (1, 2):
        several = attrs.evolve(plan, accumulate=accumulate)
        _agrees(ranks, Task(plan=several, mesh=mesh, weighted=True), terms)


def same_clipped(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """Norms are those of full gradients, and clipping is applied to full gradients."""
    value = 0.004 if terms.clip_value else None
    clipped = attrs.evolve(plan, clip_norm=0.05, clip_value=value)
    runs = _agrees(ranks, Task(plan=clipped, mesh=mesh), terms)
    assert all(run.norms == runs[0].norms for run in runs), "ranks report different norms"
    assert min(runs[0].norms) > 0.05, "nothing was clipped"


def frozen_and_tied_stay(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """A frozen parameter keeps its values, and tied parameters stay tied."""
    task = Task(plan=plan, mesh=mesh, frozen=True, dtype=terms.dtype)
    start = new_model(task).get_parameter("position")
    for run in _agrees(ranks, task, terms):
        assert torch.equal(run.parameters["position"], start), "a frozen parameter changed"
        assert run.tied, "the head and the embedding are no longer tied"


def overflow_skips_everywhere(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """If one element of one rank's gradient overflows, all ranks skip and lower the scale.

    Does nothing without fp16.
    """
    if not terms.fp16:
        return
    scale = LossScale(initial=2.0**10)
    halves = attrs.evolve(plan, precision=Precision(compute="fp16", scale=scale))
    task = Task(plan=halves, mesh=mesh, dtype=torch.float32, poke_at=2)
    runs = ranks.run(on_ranks, task)
    for run in runs:
        assert run.applied == [True, False, True], f"updates ran: {run.applied}"
        assert run.scale == 2.0**9, f"the loss scale is {run.scale}"
        for name, value in run.parameters.items():
            assert torch.isfinite(value).all(), f"{name} is not finite"
            assert torch.equal(value, runs[0].parameters[name]), f"{name} differs between ranks"


def non_finite_skips_everywhere(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """An update with a non-finite gradient on one rank is skipped without a trace."""
    skipping = attrs.evolve(plan, nonfinite="skip")
    _agrees(ranks, Task(plan=skipping, mesh=mesh, poke_at=2, poke=1e300), terms)


def resumes_where_it_stopped(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """A saved run resumes with a new model bit for bit: losses and parameters."""
    task = Task(plan=plan, mesh=mesh, dtype=terms.dtype)
    with tempfile.TemporaryDirectory(prefix="fxtrain-laws-") as folder:
        runs = ranks.run(stopped_and_resumed, task, folder)
    for full, resumed in runs:
        half = full.losses[len(full.losses) // 2 :]
        assert resumed.losses == half, f"losses are {resumed.losses}, uninterrupted {half}"
        for name, value in full.parameters.items():
            assert torch.equal(resumed.parameters[name], value), f"{name} differs after resuming"


def whole_weights_change_nothing(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """Reading full weights during a run returns its weights and does not change the run."""
    task = Task(plan=attrs.evolve(plan, accumulate=2), mesh=mesh, dtype=terms.dtype)
    runs = ranks.run(on_ranks, task)
    for run, read in zip(runs, ranks.run(on_ranks, attrs.evolve(task, look=True)), strict=True):
        assert read.losses == run.losses, f"losses are {read.losses}, without reading {run.losses}"
        for name, value in run.parameters.items():
            assert torch.equal(read.parameters[name], value), f"{name} differs after reading"
            assert torch.equal(read.seen[name], value), f"{name} was read with wrong values"


def every_function_is_used(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """An entry with a function of its own uses it, in the step and wherever else it is needed.

    Except those that the entry itself declares as `fused`, and `generate`, which the small
    transformer has not; those that describe a plan; `clip_value` only where terms have it,
    `average` only where the entry takes `Plan.local`.
    """
    entries = 0.004 if terms.clip_value else None
    busy = attrs.evolve(plan, accumulate=2, nonfinite="skip", clip_norm=0.05, clip_value=entries)
    # Weighted windows are corrected when they close.
    task = Task(plan=busy, mesh=mesh, dtype=terms.dtype, weighted=True)
    with tempfile.TemporaryDirectory(prefix="fxtrain-laws-") as folder:
        for names in ranks.run(unused_functions, task, folder):
            assert not names, f"never called: {', '.join(names)}"


def one_rank_is_the_loop(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """At one rank a plan changes no bit. Does nothing on pools of several ranks."""
    if ranks.n > 1:
        return
    task = Task(plan=attrs.evolve(plan, clip_norm=0.05), mesh=mesh, dtype=terms.dtype)
    if not terms.exact:
        _agrees(ranks, task, terms)
        return
    (run,), wanted = ranks.run(on_ranks, task), reference(task, 1)
    assert run.losses == wanted.losses, f"losses {run.losses}, reference {wanted.losses}"
    assert run.norms == wanted.norms, f"norms {run.norms}, reference {wanted.norms}"
    for name, value in wanted.parameters.items():
        assert torch.equal(run.parameters[name], value), f"{name} differs from the reference"


def parts_are_the_step(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """A loop of parts trains as `fx.step` does, bit for bit, whatever the plan decides.

    Does nothing where a strategy runs forward and backward together, so that there are no parts.
    """
    if ranks.n > 1 and "backward" in dict(strategies()[type(plan.strategy)].fused):
        return
    busy = attrs.evolve(plan, accumulate=2, nonfinite="skip", clip_norm=0.05, schedule="ranks")
    task = Task(plan=busy, mesh=mesh, dtype=terms.dtype, decay=0.5, poke_at=2, poke=1e300)
    tasks = [task, attrs.evolve(task, weighted=True)]
    if terms.fp16:
        halves = attrs.evolve(plan, accumulate=2, precision=Precision(compute="fp16"))
        tasks.append(Task(plan=halves, mesh=mesh, dtype=torch.float32, poke_at=2))
    for each in tasks:
        runs = ranks.run(on_ranks, each)
        for run, parts in zip(
            runs, ranks.run(on_ranks, attrs.evolve(each, parts=True)), strict=True
        ):
            assert parts.applied == run.applied, f"updates ran: {parts.applied}, not {run.applied}"
            assert (parts.lr, parts.scale) == (run.lr, run.scale), "schedulers or scales differ"
            assert repr(parts.norms) == repr(run.norms), f"norms {parts.norms}, not {run.norms}"
            for name, value in run.parameters.items():
                assert torch.equal(parts.parameters[name], value), f"{name} differs by parts"


def unwrap_gives_the_module_back(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """`unwrap` restores the user's module: classes, hooks, names, full values, ties."""
    for changes in ranks.run(_unwrapped, Task(plan=plan, mesh=mesh, dtype=terms.dtype)):
        assert not changes, "after unwrap: " + ", ".join(changes)


def all_at_once(
    ranks: Cluster, plan: Plan, mesh: Mesh | None = None, terms: Terms = _TERMS
) -> None:
    """Micro-batches weighted by tokens, clipped, and with a look at whole weights, in one run.

    Shows less precisely what broke than the laws one by one. It is for plans that differ in a
    detail from one that every law holds for.
    """
    entries = 0.004 if terms.clip_value else None
    several = attrs.evolve(plan, accumulate=2, clip_norm=0.05, clip_value=entries)
    runs = _agrees(ranks, Task(plan=several, mesh=mesh, weighted=True, look=True), terms)
    for run in runs:
        assert run.norms == runs[0].norms, "ranks report different norms"
        for name, value in run.parameters.items():
            assert torch.equal(run.seen[name], value), f"{name} was another when looked at"


LAWS: tuple[Law, ...] = (
    same_as_one_process,
    same_in_micro_batches,
    same_by_tokens,
    same_clipped,
    frozen_and_tied_stay,
    overflow_skips_everywhere,
    non_finite_skips_everywhere,
    resumes_where_it_stopped,
    whole_weights_change_nothing,
    every_function_is_used,
    one_rank_is_the_loop,
    parts_are_the_step,
    unwrap_gives_the_module_back,
)


def _agrees(ranks: Cluster, task: Task, terms: Terms) -> list[Run]:
    """Compare a run on ranks with the reference, and return the ranks' results."""
    task = attrs.evolve(task, dtype=terms.dtype)
    mesh = resolve_mesh(task.mesh or Mesh(), ranks.n)
    wanted = reference(task, mesh.replicate * mesh.shard)
    runs: list[Run] = ranks.run(on_ranks, task)
    for rank, run in enumerate(runs):
        _same(run, wanted, terms, f"rank {rank} of {ranks.n}")
    return runs


def _same(run: Run, wanted: Run, terms: Terms, where: str) -> None:
    assert run.applied == wanted.applied, f"{where}: updates ran: {run.applied}"
    for what in ("losses", "norms"):
        got, right = getattr(run, what), getattr(wanted, what)
        same = len(got) == len(right) and all(
            math.isclose(a, b, rel_tol=terms.rtol) for a, b in zip(got, right, strict=True)
        )
        assert same, f"{where}: {what} are {got}, reference {right}"
    assert run.parameters.keys() == wanted.parameters.keys(), f"{where}: names differ"
    for name, value in wanted.parameters.items():
        got = run.parameters[name]
        assert torch.allclose(got, value, rtol=terms.rtol, atol=terms.atol), (
            f"{where}, {name}: off by {float((got - value).abs().max()):g}"
        )


def unused_functions(ctx: Any, task: Task, folder: str) -> list[str]:
    """The functions of the entry of a task's plan that nothing calls in the life of a model."""
    with on_mesh(ctx, task.mesh) as placed:
        calls: set[str] = set()
        entry = strategies()[type(task.plan.strategy)]
        functions = {
            name: functools.partial(_noted, calls, name, function)
            for name in attrs.fields_dict(Strategy)
            if callable(function := getattr(entry, name))
            and not isinstance(function, type)
            and name not in dict(entry.fused)
        }
        counting = attrs.evolve(entry, **functions)
        trained(placed, ctx.rank, task, save_to=folder, strategy=counting)
        _use_saved(placed, task, folder, counting)
        # The small transformer generates no text; the others describe a plan and train nothing.
        wanted = functions.keys() - {"generate", "outputs_everywhere", "shards", "without_batch"}
        wanted -= {"bubble", "in_host_memory", "overlapped", "parts"}
        plan: Plan = attrs.evolve(task.plan, local=task.plan.local or LocalSGD(every=1))
        if placed.world_size == 1 or problems_of(entry, placed, plan, new_model(task)):
            wanted -= {"average"}  # of replicas that train independently
        else:
            trained(placed, ctx.rank, attrs.evolve(task, plan=plan), strategy=counting)
        wanted -= set() if task.plan.verify_replicas and placed.world_size > 1 else {"verify"}
        wanted -= {"clip_value"} if task.plan.clip_value is None else set()
        return sorted(wanted - calls)


def _noted(
    calls: set[str], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    calls.add(name)
    return function(*args, **kwargs)


def _use_saved(placed: DistContext, task: Task, folder: str, entry: Strategy) -> None:
    """Use a saved model without training it."""
    model = wrap(new_model(task), placed, task.plan, strategy=entry)
    restore(folder, placed, model)
    for _ in weights(model):
        pass
    batch = one_batch(placed, model)
    with torch.no_grad():
        model(batch[0])


def _unwrapped(ctx: Any, task: Task) -> list[str]:
    with on_mesh(ctx, task.mesh) as placed:
        module = new_model(task)
        before = _module_fingerprint(module)
        model = wrap(module, placed, task.plan, optimizer=sgd)
        tokens, _ = token_rows(2)
        backward_once(placed, model)
        if unwrap(model) is not module:
            return ["returned a different module"]
        after = _module_fingerprint(module)
        changes = [what for what in before if before[what] != after[what]]
        if module.head.weight is not module.embed.weight:
            changes.append("ties")
        fresh = new_model(task)
        module.to("cpu")
        same = torch.equal(module(tokens[:, :-1]), fresh(tokens[:, :-1]))
        if not same:
            changes.append("values")
        again = unwrap(wrap(module, placed, task.plan)).to("cpu")
        if not torch.equal(again(tokens[:, :-1]), fresh(tokens[:, :-1])):
            changes.append("values after wrapping again")
        return changes


def _module_fingerprint(module: nn.Module) -> dict[str, Any]:
    """Everything that unwrap must restore, as comparable values."""
    parts = dict(module.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "classes": {name: type(part).__name__ for name, part in parts.items()},
        "hooks": {
            name: [len(getattr(part, kind)) for kind in hooks] for name, part in parts.items()
        },
        "attributes": {name: sorted(vars(part)) for name, part in parts.items()},
        "parameters": [(n, type(p), tuple(p.shape), p.dtype) for n, p in module.named_parameters()],
        "state dict": list(module.state_dict()),
    }
