"""`fxtrain estimate-memory`."""

import os
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._errors import PlanError
from fxtrain.cli.output import as_json, print_json, print_table, say
from fxtrain.models.hub import read_hub
from fxtrain.models.memory_estimates import (
    BYTES,
    OPTIMIZERS,
    SHARDING,
    Training,
    estimate,
    inference,
    training,
)
from fxtrain.models.planned_weights import plan_weights
from fxtrain.models.weight_list import Weights, read_weights
from fxtrain.state import Plan, read_plan

__all__ = ["ESTIMATE"]

_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "working": "copies in the compute dtype",
    "buffers": "quantised weights and other tensors",
}


@click.command("estimate-memory")
@click.argument("model")
@click.option(
    "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="adamw by default"
)
@click.option(
    "--precision",
    type=click.Choice(list(BYTES)),
    multiple=True,
    help="dtype of autocast, or of the weights in inference; bf16 by default, several for a table",
)
@click.option("--plan", metavar="FILE", help="a plan: its precision and its quantised weights")
@click.option(
    "--sharding",
    type=click.Choice(SHARDING),
    default="none",
    help="what is sharded over ranks, including all before it: ZeRO 1, 2, 3; FSDP: `parameters`",
)
@click.option("--ranks", "-n", type=click.IntRange(min=1), default=1, help="ranks to shard over")
@click.option(
    "--batch", type=click.IntRange(min=1), default=1, help="concurrent sequences in inference"
)
@click.option(
    "--tokens", type=click.IntRange(min=1), default=4096, help="their length; 4096 by default"
)
@click.option("--download", is_flag=True, help="fetch the headers of MODEL from Hugging Face")
@as_json
def ESTIMATE(
    model: str,
    json_: bool,  # noqa: FBT001
    download: bool,  # noqa: FBT001
    plan: str | None,
    precision: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Estimate the memory of a model in training and inference.

    MODEL is a .safetensors file or its index, a folder with one, a config.json of transformers
    or a folder with one, MODULE:FUNCTION that builds a model, or the name of a timm model.
    Only headers and code are read, never tensors, and nothing is downloaded. With --download,
    MODEL may be OWNER/NAME on the Hugging Face hub, whose config and headers are fetched. With
    --plan, MODEL has to be a config, a function or a name, whose layers are known.
    """
    if not download:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when the model's library is imported
    away = download and not Path(model).exists()
    if plan is not None:
        if precision or away:
            other = "--download" if away else "--precision"
            raise PlanError(
                f"estimate-memory: --plan and {other} were passed. --plan sets the dtypes, and "
                f"builds the model from code that is here. Omit {other}."
            )
        reports = [_planned_report(model, read_plan(plan), **chosen)]
    else:
        found = read_hub(model) if away else read_weights(model)
        reports = [_report(found, precision=one, **chosen) for one in precision or ("bf16",)]
    if json_:
        print_json(reports if len(reports) > 1 else reports[0])
    elif len(reports) > 1:
        _print_table(reports)
    else:
        _print(reports[0], chosen)


def _report(
    weights: Weights, *, precision: str, batch: int, tokens: int, **chosen: Any
) -> dict[str, Any]:
    compute: Any = precision if precision in ("fp32", "bf16", "fp16") else "bf16"
    held, cache = inference(weights, precision=precision, batch=batch, tokens=tokens)
    trained = training(weights, precision=compute, **chosen)
    return _numbers(weights, compute, precision, trained, held, cache)


def _planned_report(
    model: str, plan: Plan, *, batch: int, tokens: int, **chosen: Any
) -> dict[str, Any]:
    """Weights in inference are as stored: autocast makes its copies for each call."""
    found = plan_weights(model, plan)
    word = plan.precision.compute
    compute = "bf16" if word == "fp8" else word
    _, cache = inference(found.weights, precision=compute, batch=batch, tokens=tokens)
    held = estimate(found.weights).nbytes
    trained = found.training(precision=compute, **chosen)
    return _numbers(found.weights, word, "as stored", trained, held, cache)


def _numbers(
    weights: Weights, compute: str, held_as: str, trained: Training, held: float,
    cache: float | None,
) -> dict[str, Any]:  # fmt: skip
    about = estimate(weights)
    return {
        "source": weights.source,
        "parameters": about.numel,
        "trained": about.trained,
        "stored_bytes": about.nbytes,
        "largest_layer": {
            "name": about.largest,
            "parameters": about.largest_numel,
            "bytes": about.largest_nbytes,
        },
        "compute": compute,
        "training_bytes": _whole(trained),
        "inference_bytes": {
            "weights": round(held),
            "cache": None if cache is None else round(cache),
        },
        "inference_precision": held_as,
    }


def _whole(sizes: Training) -> dict[str, int]:
    each = {name: round(size) for name, size in attrs.asdict(sizes).items()}
    return {**each, "total": round(sizes.total)}


def _print_table(reports: list[dict[str, Any]]) -> None:
    """A line for each dtype."""
    first = reports[0]
    say(f"{first['source']}: {first['parameters']:,} parameters.\n")
    rows: list[list[str]] = []
    for report in reports:
        held = report["inference_bytes"]
        total = held["weights"] + (held["cache"] or 0)
        sizes = (held["weights"], total, report["training_bytes"]["total"])
        rows.append([report["inference_precision"], *map(_size, sizes)])
    print_table(["precision", ">weights", ">inference", ">training, each rank"], rows)


def _print(report: dict[str, Any], chosen: dict[str, Any]) -> None:
    largest, sizes = report["largest_layer"], report["training_bytes"]
    say(
        f"{report['source']}: {report['parameters']:,} parameters, {report['trained']:,} trained, "
        f"{_size(report['stored_bytes'])} as stored.\nLargest layer: {largest['name']}, "
        f"{largest['parameters']:,} parameters, {_size(largest['bytes'])}.\n"
    )
    rows = [[words, _size(sizes[name])] for name, words in _WORDS.items()]
    print_table(
        ["training, each rank", ">size"],
        [*rows, ["total, without activations", _size(sizes["total"])]],
    )
    say(
        f"With {chosen['optimizer']}, sharding {chosen['sharding']}, {chosen['ranks']} ranks, "
        f"{report['compute']} compute. Activations depend on the batch and on the code.\n"
    )
    held, cache = report["inference_bytes"]["weights"], report["inference_bytes"]["cache"]
    rows = [
        [f"weights ({report['inference_precision']})", _size(held)],
        [
            f"keys and values of {chosen['batch']} x {chosen['tokens']} tokens",
            "unknown shape" if cache is None else _size(cache),
        ],
        ["total", _size(held + (cache or 0))],
    ]
    print_table(["inference, one device", ">size"], rows)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"
