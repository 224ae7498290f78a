"""`fxtrain estimate-memory` and `place`: the memory of a model, and where it goes."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from fxtrain._display import read_bytes, show_bytes
from fxtrain.cli.output import COUNT, NOT_NEGATIVE, PAIR, as_json, option, print_text, report, warn
from fxtrain.cli.tables import print_table
from fxtrain.errors import PlanError
from fxtrain.state import Placement, Quantize, read_plan, unstructure, write_record
from fxtrain.state.precision import quantize_of

if TYPE_CHECKING:
    from fxtrain.big.memory_estimates import Weights

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
# Of fxtrain.big.memory_estimates, which imports torch.
_OPTIMIZERS = (
    "none", "sgd", "momentum", "adagrad", "lion", "rmsprop", "adam", "adamw", "amsgrad",
    "adamw-8bit",
)  # fmt: skip
_SHARDED = click.Choice(["none", "optimizer", "gradients", "parameters"])
_DTYPES = click.Choice(["fp32", "bf16", "fp16", "int8", "int4"])
_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "working": "copies in the compute dtype",
    "buffers": "quantized weights and other tensors",
    "total": "total, without activations",
}


@click.command("estimate-memory")
@click.argument("model")
@option("--optimizer", "the optimizer", click.Choice(_OPTIMIZERS), default="adamw")
@option("--precision", "dtype of autocast and inference; bf16, or several", _DTYPES, multiple=True)
@option("--plan", "a plan: its precision and its quantized weights", metavar="FILE")
@option("--sharding", "what is sharded, with all before it", _SHARDED, default="none")
@option("--ranks -n", "ranks to shard over", COUNT, default=1)
@option("--batch", "concurrent sequences in inference", COUNT, default=1)
@option("--tokens", "their length", COUNT, default=4096)
@option("--download", "fetch the headers of MODEL from Hugging Face", is_flag=True)
@as_json
def ESTIMATE(
    model: str,
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
    from fxtrain.big.memory_estimates import read_hub, read_weights

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
        planned = read_plan(plan)
        weights = read_weights(model, planned)
        reports = [_report(weights, planned.precision.compute, stored=True, **chosen)]
    else:
        weights = read_hub(model) if away else read_weights(model)
        dtypes = precision or ("bf16",)
        reports = [_report(weights, dtype, stored=False, **chosen) for dtype in dtypes]
    report(reports if len(reports) > 1 else reports[0], lambda: _print(reports, chosen))


def _report(
    weights: "Weights", dtype: str, *, stored: bool, batch: int, tokens: int, **chosen: Any
) -> dict[str, Any]:
    """With `stored`, weights in inference are as stored: autocast copies them for each call."""
    from fxtrain.big.memory_estimates import inference, measure_weights, training

    compute: Any = dtype if dtype in ("fp32", "bf16", "fp16") else "bf16"
    held = compute if stored else dtype
    converted, cache = inference(weights, precision=held, batch=batch, tokens=tokens)
    trained = training(weights, precision=compute, **chosen)
    about = measure_weights(weights)
    return {
        "source": weights.source,
        **about,
        "compute": dtype if stored else compute,
        "training_bytes": {
            **{name: round(size) for name, size in trained.items()},
            "total": round(sum(trained.values())),
        },
        "inference_bytes": {
            "weights": round(about["stored_bytes"] if stored else converted),
            "cache": None if cache is None else round(cache),
        },
        "inference_precision": "as stored" if stored else dtype,
    }


def _print(reports: list[dict[str, Any]], chosen: dict[str, Any]) -> None:
    """Tables with a column for each dtype."""
    first, largest = reports[0], reports[0]["largest_layer"]
    print_text(
        f"{first['source']}: {first['parameters']:,} parameters, {first['trained']:,} trained, "
        f"{show_bytes(first['stored_bytes'])} as stored.\nLargest layer: {largest['name']}, "
        f"{largest['parameters']:,} parameters, {show_bytes(largest['bytes'])}.\n"
    )
    # Weights in int8 and int4 are not trained; what is trained beside them is bf16.
    trained = {each["compute"]: each["training_bytes"] for each in reports}
    rows = [
        [text, *(show_bytes(sizes[name]) for sizes in trained.values())]
        for name, text in _WORDS.items()
    ]
    print_table(["training, each rank", *(f">{dtype}" for dtype in trained)], rows)
    print_text(
        f"With {chosen['optimizer']}, sharding {chosen['sharding']}, {chosen['ranks']} ranks. "
        f"Activations depend on the batch and on the code.\n"
    )
    inferred = [
        (each["weights"], each["cache"]) for each in (r["inference_bytes"] for r in reports)
    ]
    cached = f"keys and values of {chosen['batch']} x {chosen['tokens']} tokens"
    print_table(
        ["inference, one device", *(f">{each['inference_precision']}" for each in reports)],
        [
            ["weights", *(show_bytes(weights) for weights, _ in inferred)],
            [cached, *("unknown shape" if c is None else show_bytes(c) for _, c in inferred)],
            ["total", *(show_bytes(weights + (cache or 0)) for weights, cache in inferred)],
        ],
    )


@click.command("place")
@click.argument("model")
@option("--memory", "limit, as cpu=50%; else measured", PAIR, "DEVICE=SIZE", multiple=True)
@option("--policy", "how to fill devices", click.Choice(_POLICIES), default="auto")
@option("--device devices", "where parts are, before --policy", PAIR, "NAME=DEVICE", multiple=True)
@option("--no-split", "modules that stay whole", metavar="CLASS", multiple=True)
@option("--dtype", "hold parameters in this dtype, as bfloat16", metavar="DTYPE")
@option("--quantize", "measure layers as bnb8, bnb4, torchao or a plan has them", str, "NAME|FILE")
@option("--prefetch", "units to read ahead; 1 by default", NOT_NEGATIVE)
@option("--offload-buffers", "stream buffers with parameters", is_flag=True)
@option("--activations", "room for activations, as 2GiB", metavar="SIZE")
@option("--batch", "sequences in the cache", COUNT, default=1)
@option("--tokens", "their length", NOT_NEGATIVE, default=0)
@option("--output -o", "write the placement: .json, .toml or .yaml", metavar="FILE")
@as_json
def PLACE(model: str, output: str | None, **chosen: Any) -> None:
    """Place a model that does not fit a device: what is held where, and what streams.

    MODEL is a folder with safetensors files, one such file or its index, a config.json of
    transformers or a folder with one, MODULE:FUNCTION that makes a model, or the name of a timm
    model. Headers and code are read, never tensors, and nothing is downloaded. If a part of the
    model is held on disk, up to 256 MiB of its files are read to measure the speed of the disk.
    """
    from fxtrain import big

    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, by the import of a model's own library
    sizes = big.sizes(
        model,
        no_split=chosen["no_split"] or None,
        dtype=chosen["dtype"],
        quantize=_quantize(chosen["quantize"]),
    )
    limits, devices = chosen["memory"], dict(chosen["devices"])
    budget = big.budget(limits) if limits or not devices else None
    placement = big.place(
        sizes, budget, policy=devices or chosen["policy"], prefetch=chosen["prefetch"],
        offload_buffers=chosen["offload_buffers"],
        activations=read_bytes(chosen["activations"], "--activations") or 0,
        batch=chosen["batch"], tokens=chosen["tokens"],
    )  # fmt: skip
    speed = _disk_speed(model, placement)
    if output is not None:
        write_record(placement, output)
        warn(f"Wrote {output}.")
    data = {
        "placement": unstructure(placement),
        "bytes": {device: placement.bytes_on(device) for device in placement.devices},
        "forward": attrs.asdict(big.estimate(placement, speed)),
        "disk_speed": speed,
    }
    report(data, big.table(placement, budget=budget, disk_speed=speed))


def _quantize(word: str | None) -> Quantize | None:
    """The record of a format that is named, or that of a plan in a file."""
    record = None if word is None else quantize_of(word)  # type: ignore[arg-type]
    if not isinstance(record, str):
        return record
    if not Path(record).exists():
        raise PlanError(
            f"--quantize {record}: neither a format nor a file. Choose bnb8, bnb4 or torchao, or "
            f"name a file with a plan."
        )
    quantize = read_plan(record).quantize
    if quantize is None:
        raise PlanError(
            f"--quantize {record}: this plan has no quantize. Set it, or omit --quantize."
        )
    return quantize


def _disk_speed(model: str, placement: Placement) -> float | None:
    """Bytes per second of the model's files, if some of them stream from disk."""
    from fxtrain import big

    path = Path(model)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stored = [file for file in files if file.suffix == ".safetensors" and file.is_file()]
    streams = any(unit.device == "disk" for unit in placement.streamed)
    return big.read_speed(stored) if streams else None
