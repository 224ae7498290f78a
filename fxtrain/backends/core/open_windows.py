"""An open accumulation window in a checkpoint: what the model counted, and gradients so far.

A checkpoint has each gradient twice. The tensor that ranks share is the mean over all ranks, in the
shape of the parameter: any strategy at any world size continues from it, each rank with the mean as
its own part. What a rank itself has accumulated, reduced or not, is saved beside it, and restored
bit for bit where the same strategy continues on the same mesh.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fxtrain import ops
from fxtrain.backends.core.optimizer_state import own_tensor_of_ranks
from fxtrain.ops.placeholders import fsdp_parameters
from fxtrain.ops.whole_tensors import full_values, local_values, plain_name
from fxtrain.state import AccumulationWindow, DistContext, Key, StateReader, Wrapped
from fxtrain.state.keys import BEFORE, COUNTS, GRADIENTS, PLACEMENTS, SUMS, UNREDUCED

# In the order of the numbers in a checkpoint.
_COUNTS = ("micro", "rows", "full_rows", "real_rows", "unscaled", "updates")
_PENDING = "unsharded_accumulated_grad"
# How a checkpoint writes the placements of a gradient: the dimension of a shard, or one of these.
_CODES: dict[Placement, int] = {Replicate(): -1, Partial(): -2}


def window_state(model: Wrapped) -> tuple[dict[Key, Tensor], dict[Key, Tensor], dict[str, Any]]:
    """Tensors of the open window, those of this rank only, and values, as in `ModelState`.

    Effects:
        In an open window, one exchange of names over the data ranks and one reduction of all
        gradients; those that FSDP has reduced already are gathered if there are others beside.
    """
    window, losses = model.window, model.ctx.axis("loss")
    own = counts_state(window)
    for name, parameter, part in _parameters(model):
        pending = None if part is None else _unreduced(part)
        for kind, grad in ((GRADIENTS, parameter.grad), (UNREDUCED, pending)):
            if grad is not None:
                own[Key(kind, name)] = local_values(grad)
                placements = getattr(grad, "placements", ())
                if placements != _laid_out(kind, parameter)[1]:
                    codes = [
                        how.dim if isinstance(how, Shard) else _CODES[how] for how in placements
                    ]
                    own[Key.of(PLACEMENTS, kind, name)] = torch.tensor(codes, device="cpu")
    before = model.status.before_window if window.micro else None
    own |= {Key(BEFORE, name): value for name, value in (before or {}).items()}
    tensors = _means(model, losses) if window.is_open else {}
    facts = {"own": _layout(model), "losses": losses.world_size, "replicas": _replicas(model)}
    return tensors, own, {"window": facts}


def counts_state(window: AccumulationWindow) -> dict[Key, Tensor]:
    """What a rank counted."""
    counts = [int(getattr(window, name)) for name in _COUNTS]
    return {Key(SUMS): window.sums, Key(COUNTS): torch.tensor(counts, device="cpu")}


def _layout(model: Wrapped) -> str:
    """What must be equal for each rank to continue with what it had itself."""
    sizes = [f"{axis}={size}" for axis, size in model.ctx.mesh.sizes.items()]
    return f"{', '.join(sizes)}, {model.plan.strategy}, sync_each={model.plan.sync_each}"


def _replicas(model: Wrapped) -> int:
    """How many replicas train independently, each in a window of its own."""
    replica = model.status.replica
    return 1 if replica is None else model.ctx.axis("loss").world_size // len(replica.peers)


def _parameters(model: Wrapped) -> Iterator[tuple[str, Any, Any]]:
    """Of each parameter its name, itself as a shard, and what FSDP keeps of it, if it does."""
    parts: dict[int, Any] = {}
    for part in [kept for owner in model.module.modules() for kept in fsdp_parameters(owner)]:
        parts[id(part.sharded_param)] = part
        parts[id(getattr(part, "_unsharded_param", part))] = part  # in the module after a forward
    for name, parameter in model.module.named_parameters():
        part = parts.get(id(parameter))
        yield plain_name(name), parameter if part is None else part.sharded_param, part


def _unreduced(part: Any) -> Tensor | None:
    """The unsharded gradient that FSDP has not reduced yet."""
    grad = getattr(part, _PENDING, None)
    if grad is None and hasattr(part, "_unsharded_param"):  # gathered before
        return part._unsharded_param.grad
    return grad


def _means(model: Wrapped, losses: DistContext) -> dict[Key, Tensor]:
    """The mean over the ranks of the gradients so far; the same keys on each of them."""
    shards: dict[str, Any] = {}  # reduced already
    parts: dict[str, Any] = {}
    for name, parameter, part in _parameters(model):
        shards[name] = None if part is None else parameter.grad
        parts[name] = parameter.grad if part is None else _unreduced(part)
    computed = {name for name, grad in parts.items() if grad is not None}
    unreduced = set().union(*ops.gather_objects(computed, losses))
    tensors = {
        Key(GRADIENTS, name): grad
        for name, grad in shards.items()
        if grad is not None and name not in unreduced
    }
    full = {
        name: full_gradient(parts[name], parameter)
        for name, parameter, _ in _parameters(model)
        if name in unreduced
    }
    for name, mean in ops.reduce(full, losses, op="mean").items():
        if shards[name] is not None:
            mean = mean + full_gradient(shards[name], mean)
        tensors[Key(GRADIENTS, name)] = mean
    return tensors


def full_gradient(grad: Any, like: Tensor) -> Tensor:
    """A full gradient, in the dtype of its parameter; zeros if there is none."""
    if grad is None:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return full_values(grad).to(like.dtype)


def load_window(model: Wrapped, saved: StateReader) -> None:
    """Restore gradients, counts and former buffers of an accumulation window that was open."""
    facts = saved.values.get("window", {})
    exact = facts.get("own") == _layout(model) and saved.ranks == saved.loading_ranks
    for name, parameter, part in _parameters(model):
        parameter.grad = None
        if hasattr(part, "_unsharded_param"):
            part._unsharded_param.grad = None
        if pending := part is not None and _PENDING in vars(part):  # until torch 2.13
            setattr(part, _PENDING, None)
        if exact and (pending or part is None):
            parameter.grad = _own_grad(saved, GRADIENTS, name, parameter)
            unreduced = _own_grad(saved, UNREDUCED, name, parameter)
            if unreduced is not None:
                setattr(part, _PENDING, unreduced)
        elif (mean := Key(GRADIENTS, name)) in saved.shapes:
            parameter.grad = torch.empty_like(parameter, requires_grad=False)
            saved.fill(mean, parameter.grad)
    rank = saved.rank if exact else 0  # they are equal between windows
    names = [name for name, _ in model.module.named_buffers()]
    before = {name: saved.own(Key(BEFORE, name), rank) for name in names}
    found = {n: value.to(model.ctx.device) for n, value in before.items() if value is not None}
    model.status.before_window = found or None
    windows = saved_windows(saved)
    if not windows:  # from another library, which saves no open window
        model.window.updates = saved.updates
    elif exact:
        _set_counts(model.window, windows[saved.rank], windows[saved.rank].sums)
    else:
        ranks, replicas = facts.get("losses", saved.ranks), facts.get("replicas", 1)
        _load_counts(model, windows, ranks, replicas)


def _laid_out(kind: str, parameter: Any) -> tuple[Any, tuple[Placement, ...]]:
    """Mesh and placements of a gradient that is laid out as its parameter; None without a mesh.

    An unreduced one is a DTensor only over the tensor axis, which is the last of a mesh.
    """
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
    if kind == GRADIENTS or mesh is None:
        return mesh, placements
    return (mesh["tensor"], placements[-1:]) if "tensor" in mesh.mesh_dim_names else (None, ())


def _own_grad(saved: StateReader, kind: str, name: str, parameter: Any) -> Tensor | None:
    """What this rank itself had accumulated of a gradient, placed as it was."""
    local = saved.own(Key(kind, name), saved.rank)
    if local is None:
        return None
    local = local.to(parameter.device)
    mesh, placements = _laid_out(kind, parameter)
    if mesh is None:
        return local
    if (codes := saved.own(Key.of(PLACEMENTS, kind, name), saved.rank)) is not None:
        by_code = {code: how for how, code in _CODES.items()}
        placements = tuple(by_code[code] if code < 0 else Shard(code) for code in codes.tolist())
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _load_counts(
    model: Wrapped, windows: list[AccumulationWindow], ranks: int, replicas: int
) -> None:
    """Counts at another world size or under another strategy.

    Args:
        ranks: Over which the gradients of the saved window were averaged.
        replicas: That trained independently, each on rows of its own.
    """
    first, losses = windows[0], model.ctx.axis("loss")
    for name in ("rows", "full_rows"):
        setattr(
            first, name, sum(getattr(window, name) for window in windows) * replicas // len(windows)
        )
    # Other ranks of a data rank have the same weight. The sum over the data ranks stays.
    weight = torch.stack([window.weight for window in windows]).sum() * ranks / len(windows)
    sums = first.sums.clone()
    sums[0], sums[1] = first.scale * losses.world_size / ranks, weight * (losses.rank == 0)
    _set_counts(model.window, first, sums)


def _set_counts(window: AccumulationWindow, saved: AccumulationWindow, sums: Tensor) -> None:
    window.sums.copy_(sums)
    for name in _COUNTS:
        setattr(window, name, getattr(saved, name))


def saved_windows(saved: StateReader) -> list[AccumulationWindow]:
    """The windows of all ranks that saved; empty for a checkpoint of another library."""
    pairs = zip(
        own_tensor_of_ranks(saved, Key(SUMS)), own_tensor_of_ranks(saved, Key(COUNTS)), strict=True
    )
    return [
        AccumulationWindow(sums=sums, **dict(zip(_COUNTS, counts.tolist(), strict=True)))
        for sums, counts in pairs
    ]
