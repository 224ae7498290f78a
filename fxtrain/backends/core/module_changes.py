"""Changes to a module that a plan asks for, compilation among them; `fx.unwrap` reverts them.

A module is compared before and after, which finds what any strategy changed (classes, hooks,
attributes), to undo or to hide it. Values of parameters and buffers are left alone.

    changes_since = record_module(module) ── wrap ──► undo, hide = changes_since()
"""

import copy
import difflib
import fnmatch
import functools
import hashlib
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxtrain import _extensions, ops
from fxtrain._display import counted
from fxtrain.ops.collectives import pieces
from fxtrain.state import Compile, DistContext, Plan, Wrapped
from fxtrain.state.wrapped import METHOD, is_own_method

_aten = torch.ops.aten
# How the names of operators begin whose results may be kept; attention has a kernel per device.
_KEPT = {
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "attention": ("aten::_scaled_dot_product_",),
}
_VALUES = ("_parameters", "_buffers", "_modules")
_ABSENT = object()
# What uses the axes of a mesh.
_USES = {
    "shard": "FSDP()",
    "context": "Plan(context=fx.CP()), with FSDP or DDP",
    "tensor": "FSDP(tensor=fx.TP(...))",
    "pipeline": "PP(), with stages=fx.FSDP(...) for more axes",
}
# `undo` and `hide` of `record_module`.
Changes = tuple[Callable[[], None], Callable[[], Callable[[], None]]]
# A submodule, its class, its changed attributes as they were, and the keys of added hooks by kind.
_Changed = tuple[nn.Module, type, Mapping[str, Any], Mapping[str, Any]]
Checkpointer = Callable[[Callable[..., Any], tuple[str, ...]], Callable[..., Any]]


def unmatched_names(module: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Problems with class names in the plan that match no submodule."""
    problems = unknown_classes(module, plan.recompute, field="Plan.recompute")
    if plan.compile is not None:
        problems += unknown_classes(module, plan.compile.blocks, field="Plan.compile.blocks")
    problems += _method_problems(module, plan.methods)
    if not plan.recompute and (plan.recompute_every > 1 or plan.recompute_keep):
        problems.append(
            f"Plan(recompute_every={plan.recompute_every}, recompute_keep={plan.recompute_keep}) "
            f"applies to the submodules in recompute, which is empty. Name their classes there."
        )
    return tuple(problems)


def _method_problems(module: nn.Module, names: Iterable[str]) -> list[str]:
    """A problem for each name that is none of the model's own methods."""
    kind, problems = type(module), list[str]()
    for name in names:
        method = getattr(module, name, None)
        if hasattr(Wrapped, name) or hasattr(nn.Module, name):
            problems.append(
                f"Plan.methods names {name!r}, which every module or every wrapped model has. Name "
                f"methods of {kind.__name__} itself."
            )
        elif not callable(method) or isinstance(method, nn.Module):
            own = [each for each in vars(kind) if is_own_method(module, each) and each != "forward"]
            near = difflib.get_close_matches(name, own, n=3) or own[:10]
            problems.append(
                f"Plan.methods names {name!r}, which is no method of {kind.__name__}. "
                + (f"Did you mean {', '.join(near)}?" if near else "It has none of its own.")
            )
    return problems


def accept_methods(module: nn.Module, plan: Plan) -> None:
    """Let the module's forward run the methods that the plan names.

    An engine runs a module by its forward: there it gathers parameters, prepares the reduction of
    gradients, or streams weights. So a method is run by a call of the engine that names it.

    Effects:
        Sets `forward` on the module, if the plan names methods.
    """
    if plan.methods:
        run = functools.partial(_named_method, module, module.forward)
        module.forward = functools.update_wrapper(run, module.forward)


def _named_method(
    module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    name = kwargs.pop(METHOD, None)
    return (forward if name is None else getattr(module, name))(*args, **kwargs)


def xla_problems(ctx: DistContext, name: str) -> tuple[str, ...]:
    """A problem if torch's own machinery would run on XLA, where nothing would end its graph."""
    if ctx.device.type != "xla":
        return ()
    return (
        f"{name}() does not support XLA, on which this context computes. Use "
        f"Plan(strategy=fx.XLA()), or fx.detect(device='cpu').",
    )


def unused_axes(ctx: DistContext, name: str, axes: Iterable[str]) -> list[str]:
    """A problem for each of these axes that has several ranks, which would be redundant."""
    return [
        f"The mesh has {axis}={getattr(ctx.mesh, axis)}, which {name} does not use: these ranks "
        f"would all compute the same. Use {_USES[axis]}, or omit the axis from fx.Mesh(...)."
        for axis in axes
        if getattr(ctx.mesh, axis) > 1
    ]


def model_signature(module: nn.Module) -> str:
    """Names, shapes and dtypes of a model as a digest, which must be equal on all replicas."""
    named = [*module.named_parameters(), *module.named_buffers()]
    lines = [
        f"{name} {'lazy' if is_lazy(t) else list(t.shape)} {t.dtype} {t.requires_grad}"
        for name, t in named
    ]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=6).hexdigest()
    count = sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
    sizes = f"{counted(count, 'parameter')} in {counted(len(lines), 'tensor')}"
    return f"{type(module).__name__} with {sizes}, {digest}"


def checkpointed(forward: Callable[..., Any], keep: tuple[str, ...]) -> Callable[..., Any]:
    """A forward whose activations are recomputed in backward, except those of some operators."""
    options: dict[str, Any] = {"use_reentrant": False}
    if keep:
        names = tuple(itertools.chain(*map(_KEPT.__getitem__, keep)))

        def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
            kept = operator.name().startswith(names)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(checkpoint, forward, **options)


def prepare_module(
    module: nn.Module,
    plan: Plan,
    ctx: DistContext,
    again: Checkpointer = checkpointed,
    *,
    hooked: bool = False,
) -> None:
    """Recompute activations and compile, as the plan says.

    Args:
        again: From a forward and operators to keep, to a forward that recomputes.
        hooked: Whether a strategy will put hooks on submodules that torch does not trace.

    Effects:
        Sets `forward` on recomputed submodules and torch's compiled call on compiled ones;
        parameter names stay as they are.
    """
    chosen = _named(module, plan.recompute)[:: plan.recompute_every]
    for part in chosen:
        part.forward = again(part.forward, plan.recompute_keep)
    if plan.compile is not None:
        blocks = _named(module, plan.compile.blocks) if plan.compile.blocks else [module]
        compile_parts(blocks, plan.compile, ctx, hooked=hooked)


def model_values(module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters and buffers of a model; of quantized weights, the tensors they consist of."""
    tensors = _extensions.quantized_tensors(module).values()
    return (*_extensions.plain_parameters(module), *module.buffers(), *tensors)


def send_values(tensors: Iterable[Tensor], data: DistContext) -> None:
    """Send rank 0's values to every data rank, in place; no traffic without tensors.

    Effects:
        A broadcast for each piece of `ops.collectives.pieces`, of which one at a time needs memory.
    """
    values = [tensor.data for tensor in tensors]
    for places in pieces(values):  # the same on all ranks, which have compared their models
        part = [values[place] for place in places]
        for tensor, sent in zip(part, ops.broadcast(part, data), strict=True):
            tensor.copy_(sent)


def _named(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    return [part for part in module.modules() if type(part).__name__ in names]


def move_module(
    module: nn.Module, device: torch.device, *, dtype: torch.dtype | None = None
) -> None:
    """Move a module to a device in place, and cast it if a dtype is given.

    Effects:
        On devices whose memory torch cannot exchange with the host's (XLA, devices of other
        packages), the module gets new parameters. `nn.Module.to` makes one for each name there;
        here, names that shared a parameter still share one.
    """
    tied = _tied_names(module)
    module.to(device, dtype)
    for first, *others in tied:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = parameter


def _tied_names(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def unknown_classes(module: nn.Module, names: Iterable[str], *, field: str) -> list[str]:
    """A problem for each class name that matches no submodule."""
    known = sorted({type(part).__name__ for part in module.modules()})
    return [
        f"{field} names the class {name!r}, but no submodule of {type(module).__name__} has it. "
        f"Did you mean {', '.join(difflib.get_close_matches(name, known, n=3) or known[:10])}?"
        for name in names
        if name not in known
    ]


def unknown_patterns(
    patterns: Iterable[str], names: list[str], *, field: str, what: str = "parameter"
) -> list[str]:
    """A problem for each pattern that matches no name."""
    return [
        f"{field}: no {what} matches {pattern!r}. "
        f"Did you mean {', '.join(difflib.get_close_matches(pattern, names, n=3) or names[:5])}?"
        for pattern in patterns
        if not fnmatch.filter(names, pattern)
    ]


def compile_parts(
    parts: Sequence[nn.Module], config: Compile, ctx: DistContext, *, hooked: bool
) -> None:
    """Compile the calls of some modules, in place.

    Args:
        hooked: Hooks that torch does not trace will be between a module and its forward.

    Effects:
        Sets torch's compiled call on them and, with `hooked`, `forward` on torch's own modules
        inside. Each call that creates graphs logs their number, on rank 0.
    """
    for part in parts:
        for inner in part.modules():
            # torch traces a forward of its own modules only from a frame outside torch.
            of_torch = str(getattr(type(inner).forward, "__module__", "")).startswith("torch.nn.")
            if hooked and of_torch and "forward" not in vars(inner):
                inner.forward = types.MethodType(_wrapped_forward, inner)
        # What nn.Module.compile sets. But that silently leaves torch's own modules, such as
        # nn.Sequential, uncompiled: torch traces nothing that starts in its own code.
        compiled: Any = torch.compile(
            _calls(part),
            backend=config.backend,
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
            options={"freezing": True} if config.prepack else None,
        )
        part._compiled_call_impl = _counted(compiled, type(part).__name__, ctx)


def _counted(compiled: Callable[..., Any], name: str, ctx: DistContext) -> Callable[..., Any]:
    """A compiled call that logs when it creates graphs."""
    from torch._dynamo.utils import counters  # which torch.compile loads anyway

    def call(*args: Any, **kwargs: Any) -> Any:
        before = counters["stats"]["unique_graphs"]
        out = compiled(*args, **kwargs)
        if created := counters["stats"]["unique_graphs"] - before:
            text = f"torch.compile created {counted(created, 'graph')} of {name}"
            ops.log(ctx, "fxtrain.compile").info("%s, %d in all", text, before + created)
        return out

    return call


def _calls(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _wrapped_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def record_module(module: nn.Module, *, added: bool = False) -> Callable[[], Changes]:
    """Record how a module is before it is changed.

    Args:
        added: Only attributes that are new count, and not those that were set to something else.

    Returns:
        A function that finds what has changed since, and returns (undo, hide). `undo()` reverts
        these changes, and no later ones, for good. `hide()` reverts them and returns a function
        that puts them back: the module as it was when `hide` was called, including parameters,
        buffers, modes and attributes that were changed in the meantime.
    """
    before = [(part, type(part), *_attributes_and_hooks(part)) for part in module.modules()]

    def changes_since() -> Changes:
        parts: list[_Changed] = []
        for part, kind, attributes, hooks in before:
            new_attributes, new_hooks = _attributes_and_hooks(part)
            changed = {
                name: attributes.get(name, _ABSENT)
                for name in attributes.keys() | new_attributes.keys()
                if attributes.get(name, _ABSENT) is not new_attributes.get(name, _ABSENT)
                and not (added and name in attributes)
            }
            more = {name: keys - hooks.get(name, set()) for name, keys in new_hooks.items()}
            if type(part) is not kind or changed or any(more.values()):
                parts.append((part, kind, changed, more))
        return functools.partial(_undo, parts), functools.partial(_hide, module, parts)

    return changes_since


def _undo(parts: Iterable[_Changed]) -> None:
    for part, kind, attributes, hooks in parts:
        own = vars(part)
        part.__class__ = kind
        for name, value in attributes.items():
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value
        for name, keys in hooks.items():
            for key in keys:
                own[name].pop(key, None)


def _hide(module: nn.Module, parts: Iterable[_Changed]) -> Callable[[], None]:
    now = [(part, type(part), dict(vars(part))) for part in module.modules()]
    copies: dict[int, Any] = {}  # modules that share a list share its copy
    for part, _, own in now:
        # Copies, so that changes in the meantime only affect the copies.
        vars(part).update({name: dict(own[name]) for name in _VALUES})
        vars(part).update({name: OrderedDict(hooks) for name, hooks in _hooks(part).items()})
        vars(part).update(
            {
                name: copies.setdefault(id(value), copy.copy(value))
                for name, value in own.items()
                if type(value) in (list, dict, set) and name not in (*_VALUES, *_hooks(part))
            }
        )
    _undo(parts)

    def restore() -> None:
        for part, kind, own in now:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(own)

    return restore


def _attributes_and_hooks(part: nn.Module) -> tuple[dict[str, Any], dict[str, set[Any]]]:
    """A submodule's own attributes, and the keys of its hooks by kind."""
    hooks = _hooks(part)
    kept = {*_VALUES, "training", *hooks}  # "training" is the user's to change
    own = {name: value for name, value in vars(part).items() if name not in kept}
    return own, {name: set(entries) for name, entries in hooks.items()}


def _hooks(part: nn.Module) -> dict[str, dict[Any, Any]]:
    """Hooks by kind, which are compared by their keys."""
    return {
        name: value
        for name, value in vars(part).items()
        if "hooks" in name and isinstance(value, dict)
    }
