"""The counterpart of Accelerate's fp8 settings: recipes of a plan's precision."""

from collections.abc import Callable
from typing import Any

from fxtrain.interop.accelerate_notes import FP8, MSAMP
from fxtrain.interop.accelerate_rules import Facts, KeyOutcome, Rule, text, truth, whole

__all__ = ["fp8_rules"]

_RECIPE = "plan.precision.recipe"
_BACKENDS = {"TE": "te", "AO": "float8", "TORCHAO": "float8", "MSAMP": "float8"}
_BF16 = KeyOutcome(sets={"plan.precision": "bf16"}, note=FP8)


def _mixed_precision(value: Any, facts: Facts, kind: str) -> KeyOutcome:
    name = text(value).upper()
    if name == "FP8":
        wanted = _converts(facts, kind)
        return KeyOutcome(sets={"plan.precision.compute": "fp8"}) if wanted else _BF16
    known = {"NO": "fp32", "FP16": "fp16", "BF16": "bf16"}
    if name not in known:
        return KeyOutcome(note="unknown precision; plan.precision is one of fp32, bf16, fp16, fp8")
    return KeyOutcome(sets={"plan.precision": known[name]})


def fp8_rules(kind: str) -> dict[str, Rule]:
    """The rules of precision and of the fp8 section.

    Args:
        kind: The distributed_type of the config.
    """
    te = {
        "margin": ("margin", whole),
        "amax_history_length": ("history", whole),
        "amax_history_len": ("history", whole),
        "amax_compute_algorithm": ("amax", _lower),
        "amax_compute_algo": ("amax", _lower),
        "use_autocast_during_eval": ("evaluate", truth),
        "use_mxfp8_block_scaling": (
            "scaling",
            lambda one: "mxfp8" if truth(one) else "delayed",
        ),
    }
    untranslated = {
        "interval": "Transformer Engine no longer has this setting",
        "override_linear_precision": "fx.TE computes all three products of a layer in float8; "
        "skip=... leaves layers out",
        "opt_level": MSAMP,
    }
    torchao = {
        "enable_fsdp_float8_all_gather": ("gather", lambda one: "fp8" if truth(one) else "plan"),
        "pad_inner_dim": ("pad", truth),
    }
    return {
        "mixed_precision": lambda value, facts: _mixed_precision(value, facts, kind),
        "fp8.backend": lambda value, facts: _backend(value, facts, kind),
        **{f"fp8.{key}": _noted(note) for key, note in untranslated.items()},
        "fp8.format": _format(kind),
        **{f"fp8.{key}": _field("te", kind, *how) for key, how in te.items()},
        **{f"fp8.{key}": _field("float8", kind, *how) for key, how in torchao.items()},
    }


def _lower(value: Any) -> str:
    return text(value).lower()


def _chosen(facts: Facts) -> str | None:
    return _BACKENDS.get(str(facts.get("fp8.backend", "AO")).upper())


def _converts(facts: Facts, kind: str) -> bool:
    """Whether the plan computes in fp8: DeepSpeed's engine does not."""
    return str(facts.get("mixed_precision", "")).upper() == "FP8" and kind != "DEEPSPEED"


def _backend(value: Any, facts: Facts, kind: str) -> KeyOutcome:
    note, recipe = MSAMP if text(value).upper() == "MSAMP" else "", _chosen(facts)
    if recipe is None:
        return KeyOutcome(note="unknown backend; fx.Float8 and fx.TE stand for AO and TE")
    if not _converts(facts, kind):
        return KeyOutcome(note=note or FP8)
    return KeyOutcome(sets={f"{_RECIPE}.kind": recipe}, note=note)


def _noted(note: str) -> Rule:
    return lambda value, facts: KeyOutcome(note=note)


def _format(kind: str) -> Rule:
    """E5M2 alone, which Transformer Engine refuses in training, becomes the default."""
    convert = _field("te", kind, "format", _lower)
    refused = _noted("Transformer Engine does not train in E5M2 alone; hybrid is used instead")
    return lambda value, facts: (refused if _lower(value) == "e5m2" else convert)(value, facts)


def _field(recipe: str, kind: str, name: str, read: Callable[[Any], Any]) -> Rule:
    def rule(value: Any, facts: Facts) -> KeyOutcome:
        if not _converts(facts, kind) or _chosen(facts) != recipe:
            return KeyOutcome(note=FP8)
        if name == "gather" and kind != "FSDP":
            return KeyOutcome(note="only FSDP gathers weights")
        return KeyOutcome(sets={f"{_RECIPE}.kind": recipe, f"{_RECIPE}.{name}": read(value)})

    return rule
