"""`fxtrain estimate-memory`."""

import os
from pathlib import Path
from typing import Any

import attrs
import click

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
from fxtrain.models.weight_list import Weights, read_weights

__all__ = ["ESTIMATE"]

_WORDS = {
    "parameters": "parameters (fp32)",
    "gradients": "gradients (fp32)",
    "optimizer": "optimizer state",
    "working": "copies in the compute dtype",
    "buffers": "other tensors",
}


@click.command("estimate-memory")
@click.argument("model")
@click.option(
    "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="adamw by default"
)
@click.option(
    "--precision",
    type=click.Choice(list(BYTES)),
    default="bf16",
    help="dtype of autocast, or of the weights in inference; bf16 by default",
)
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
def ESTIMATE(model: str, json_: bool, download: bool, **chosen: Any) -> None:  # noqa: FBT001
    """Estimate the memory of a model in training and inference.

    MODEL is a .safetensors file or its index, a folder with one, a config.json of transformers
    or a folder with one, MODULE:FUNCTION that builds a model, or the name of a timm model.
    Only headers and code are read, never tensors, and nothing is downloaded. With --download,
    MODEL may be OWNER/NAME on the Hugging Face hub, whose config and headers are fetched.
    """
    if not download:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when the model's library is imported
    away = download and not Path(model).exists()
    report = _report(read_hub(model) if away else read_weights(model), **chosen)
    if json_:
        print_json(report)
    else:
        _print(report, chosen)


def _report(
    weights: Weights,
    *,
    optimizer: str,
    precision: str,
    sharding: str,
    ranks: int,
    batch: int,
    tokens: int,
) -> dict[str, Any]:
    about = estimate(weights)
    compute = precision if precision in ("fp32", "bf16", "fp16") else "bf16"
    held, cache = inference(weights, precision=precision, batch=batch, tokens=tokens)
    trained = training(
        weights, optimizer=optimizer, precision=compute, sharding=sharding, ranks=ranks
    )
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
    }


def _whole(sizes: Training) -> dict[str, int]:
    each = {name: round(size) for name, size in attrs.asdict(sizes).items()}
    return {**each, "total": round(sizes.total)}


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
        [f"weights ({chosen['precision']})", _size(held)],
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
