"""The one optimizer of a DeepSpeed engine: who provides it, and where it computes."""

import shutil
import warnings
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from fxtrain.backends.deepspeed.config import ZERO, device, section
from fxtrain.backends.deepspeed.engine import load
from fxtrain.errors import PlanError
from fxtrain.ops.same_errors import problem_of_ranks
from fxtrain.state import DeepSpeed, DistContext, FromConfig, from_config

# How torch's optimizers may compute, which DeepSpeed's do not.
_TORCH_ONLY = (
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "initial_accumulator_value",
    "lr_decay",
    "maximize",
)


def is_from_config(factory: Any) -> bool:
    """Whether a factory is the marker for "from the DeepSpeed config"."""
    return factory is from_config or isinstance(factory, FromConfig)


def auto_values(optimizer: Any, scheduler: Any) -> FromConfig:
    """The values for "auto": the scheduler's take precedence over the optimizer's."""
    values: dict[str, Any] = {}
    for factory in (optimizer, scheduler):
        if isinstance(factory, FromConfig):
            values |= {
                field.name: getattr(factory, field.name)
                for field in attrs.fields(FromConfig)
                if getattr(factory, field.name) != field.default
            }
    return FromConfig(**values)


def ownership_problems(
    config: Mapping[str, Any], optimizer: Any, scheduler: Any
) -> tuple[str, ...]:
    """Problems with who provides optimizer and scheduler."""
    if optimizer is None and scheduler is None:
        return ()
    problems: list[str] = []
    for name, factory in (("optimizer", optimizer), ("scheduler", scheduler)):
        configured = bool(section(config, name))
        if is_from_config(factory) and not configured:
            problems.append(
                f"wrap({name}=fx.from_config): the DeepSpeed config has no {name!r} section. "
                f"Add one, or pass a factory."
            )
        if not is_from_config(factory) and configured:
            what = "none" if factory is None else "a factory"
            problems.append(
                f"The DeepSpeed config has a section {name!r}, but wrap received {what}. Pass "
                f"{name}=fx.from_config, or remove the section."
            )
    custom = scheduler is not None and not is_from_config(scheduler)
    if is_from_config(optimizer) and custom:
        problems.append(
            "wrap(optimizer=fx.from_config, scheduler=<a factory>): DeepSpeed creates the config's "
            "optimizer itself, in a class that depends on stage and offload, so a scheduler "
            "made for another class may not work. Pass scheduler=fx.from_config with a "
            "'scheduler' section, or pass a factory for the optimizer too."
        )
    return tuple(problems)


def single_optimizer(optimizers: tuple[torch.optim.Optimizer, ...]) -> torch.optim.Optimizer:
    """The optimizer that an engine steps.

    Raises:
        PlanError: there are several, or it is one that updates whole matrices.
    """
    if len(optimizers) != 1:
        raise PlanError(
            f"DeepSpeed steps one optimizer per model, but the factory returned "
            f"{len(optimizers)}. Use parameter groups of one optimizer."
        )
    if isinstance(optimizers[0], torch.optim.Muon):
        raise PlanError(
            "wrap(optimizer=...): asked for torch's Muon under DeepSpeed, which flattens "
            "parameters, and Muon updates whole matrices. Use FSDP, or DeepSpeed's own: "
            '"type": "Muon" in the section "optimizer" of its config, and optimizer=fx.from_config.'
        )
    return optimizers[0]


def compiled_on_cpu(
    optimizer: torch.optim.Optimizer, config: Mapping[str, Any], plan: DeepSpeed, ctx: DistContext
) -> torch.optim.Optimizer:
    """DeepSpeed's compiled optimizer in place of torch's, if updates run on the CPU.

    Effects:
        Compiles an operator on its first use on a machine, which takes about a minute.

    Raises:
        PlanError: `cpu_optimizer="deepspeed"` is not available; on every rank.
    """
    if device(section(config, ZERO), "offload_optimizer") == "none":
        return optimizer
    if plan.cpu_optimizer == "torch" or type(optimizer).__module__.startswith("deepspeed"):
        return optimizer
    reason = _why_not(optimizer) or _without_compiler(ctx)
    if reason:
        _use_torch_adam(reason, type(optimizer).__name__, plan)
        return optimizer
    groups = [
        {name: value for name, value in group.items() if name not in _TORCH_ONLY}
        for group in optimizer.param_groups
    ]
    if isinstance(optimizer, torch.optim.Adagrad):
        return load().ops.adagrad.DeepSpeedCPUAdagrad(groups)
    return load().ops.adam.DeepSpeedCPUAdam(
        groups, adamw_mode=isinstance(optimizer, torch.optim.AdamW)
    )


def prepare_section(config: dict[str, Any], plan: DeepSpeed, ctx: DistContext) -> None:
    """Make the config's own Adam compute without a compiler if there is none.

    Raises:
        PlanError: `cpu_optimizer="deepspeed"` is not available; on every rank.
    """
    found = config.get("optimizer")
    offloaded = device(section(config, ZERO), "offload_optimizer") != "none"
    if not offloaded or not isinstance(found, dict):
        return
    if str(found.get("type")).lower() not in ("adam", "adamw"):
        return
    params = found.setdefault("params", {})
    if params.get("torch_adam"):
        return
    reason = "" if plan.cpu_optimizer == "torch" else _without_compiler(ctx)
    if reason:
        _use_torch_adam(reason, str(found["type"]), plan)
    if reason or plan.cpu_optimizer == "torch":
        params["torch_adam"] = True


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        return f"DeepSpeed has no compiled {kind.__name__} (only Adam, AdamW and Adagrad)"
    plain = {"amsgrad": False, "maximize": False, "lr_decay": 0, "initial_accumulator_value": 0}
    special = [
        name
        for name, usual in plain.items()
        if any(group.get(name, usual) != usual for group in optimizer.param_groups)
    ]
    if special:
        return f"DeepSpeed's compiled {kind.__name__} has no {', '.join(special)}"
    return ""


def _without_compiler(ctx: DistContext) -> str:
    """Why the operator cannot be compiled on some rank, for every rank; empty if it can."""
    missing = problem_of_ranks("wrap", ", ".join(_missing_tools()), ctx)
    if not missing:
        return ""
    return (
        f"the compiled optimizer needs a C++ compiler and ninja on every rank "
        f"({'; '.join(missing.splitlines())}; for example: apt-get install g++, pip install ninja)"
    )


def _missing_tools() -> tuple[str, ...]:
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    missing = [f"no {compiler}"] if shutil.which(compiler) is None else []
    if not cpp_extension.is_ninja_available():
        missing.append("no ninja")
    return tuple(missing)


def _use_torch_adam(reason: str, name: str, plan: DeepSpeed) -> None:
    if plan.cpu_optimizer == "deepspeed":
        raise PlanError(
            f"DeepSpeed(cpu_optimizer='deepspeed'): {reason}. Use cpu_optimizer='torch' to "
            f"compute updates with torch's {name}, which is slower."
        )
    warnings.warn(
        f"DeepSpeed: {reason}. Updates of the offloaded optimizer are computed by torch's "
        f"{name} on the CPU, several times slower than by the compiled one; the rest of the "
        f"step is not affected. Set cpu_optimizer='torch' to silence this warning.",
        stacklevel=2,
    )
