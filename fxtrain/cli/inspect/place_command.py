"""`fxtrain place`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain import big
from fxtrain._byte_units import read_bytes
from fxtrain._errors import PlanError
from fxtrain.cli.output import as_json, print_json, print_renderable, warn
from fxtrain.state import Placement, Quantize, read_plan, unstructure, write_record
from fxtrain.state.low_precision.quantized_weights import quantize_of

__all__ = ["PLACE"]

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")


@click.command("place")
@click.argument("model")
@click.option(
    "--memory",
    multiple=True,
    metavar="DEVICE=SIZE",
    help="what the model may take, as cuda:0=10GiB, cpu=50% or disk=0; measured if not given",
)
@click.option("--policy", type=click.Choice(_POLICIES), default="auto", help="auto by default")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="NAME=DEVICE",
    help="place a module or tensor there, in place of --policy; the longest name counts",
)
@click.option("--no-split", multiple=True, metavar="CLASS", help="modules that stay whole")
@click.option("--dtype", metavar="DTYPE", help="hold parameters in this dtype, as bfloat16")
@click.option(
    "--quantize",
    metavar="FORMAT|FILE",
    help="measure layers as bnb8, bnb4 or torchao quantises them, or as a plan in FILE does",
)
@click.option("--prefetch", type=click.IntRange(min=0), help="units to read ahead; 1 by default")
@click.option("--offload-buffers", is_flag=True, help="stream buffers with parameters")
@click.option("--activations", default="0", metavar="SIZE", help="room for activations, as 2GiB")
@click.option("--batch", type=click.IntRange(min=1), default=1, help="sequences in the cache")
@click.option("--tokens", type=click.IntRange(min=0), default=0, help="their length")
@click.option("--output", "-o", metavar="FILE", help="write the placement: .json, .toml or .yaml")
@as_json
def PLACE(model: str, json_: bool, output: str | None, **chosen: Any) -> None:  # noqa: FBT001
    """Place a model that does not fit a device: what is held where, and what streams.

    MODEL is a folder with safetensors files, one such file or its index, a config.json of
    transformers or a folder with one, MODULE:FUNCTION that makes a model, or the name of a timm
    model. Headers and code are read, never tensors, and nothing is downloaded. If a part of the
    model is held on disk, up to 256 MiB of its files are read to measure the speed of the disk.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, by the import of a model's own library
    sizes = big.sizes(
        model,
        no_split=chosen["no_split"] or None,
        dtype=chosen["dtype"],
        quantize=_quantize(chosen["quantize"]),
    )
    limits = _pairs("--memory", chosen["memory"], "cuda:0=10GiB")
    devices = _pairs("--device", chosen["devices"], "model.layers.3=disk")
    budget = big.budget(limits) if limits or not devices else None
    placement = big.place(
        sizes, budget, policy=devices or chosen["policy"], prefetch=chosen["prefetch"],
        offload_buffers=chosen["offload_buffers"], activations=_size(chosen["activations"]),
        batch=chosen["batch"], tokens=chosen["tokens"],
    )  # fmt: skip
    speeds = _speeds(model, placement)
    if output is not None:
        write_record(placement, output)
        warn(f"Wrote {output}.")
    if json_:
        print_json(_report(placement, speeds))
    else:
        print_renderable(big.table(placement, budget=budget, speeds=speeds))


def _quantize(word: str | None) -> Quantize | None:
    """The record of a format that is named, or that of a plan in a file."""
    made = None if word is None else quantize_of(word)  # type: ignore[arg-type]
    if not isinstance(made, str):
        return made
    if not Path(made).exists():
        raise PlanError(
            f"--quantize {made}: neither a format nor a file. Choose bnb8, bnb4 or torchao, or "
            f"name a file with a plan."
        )
    found = read_plan(made).quantize
    if found is None:
        raise PlanError(
            f"--quantize {made}: this plan has no quantize. Set it, or omit --quantize."
        )
    return found


def _pairs(option: str, words: Sequence[str], example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.rpartition("=")
        if not equals or not value:
            raise PlanError(f"{option} {word}: write it as {example}.")
        if name in found:
            raise PlanError(f"{option} {word}: {name!r} is given twice. Keep one.")
        found[name] = value
    return found


def _size(text: str) -> int:
    return 0 if text == "0" else read_bytes(text, "--activations") or 0


def _speeds(model: str, placement: Placement) -> big.Speeds:
    """The speeds of a usual machine, but for that of the disk with the model's files."""
    speeds = big.Speeds()
    path = Path(model)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stored = [file for file in files if file.suffix == ".safetensors" and file.is_file()]
    if not any(unit.device == "disk" for unit in placement.streamed) or not stored:
        return speeds
    disk = big.read_speed(stored)
    return speeds if disk is None else attrs.evolve(speeds, disk=disk)


def _report(placement: Placement, speeds: big.Speeds) -> dict[str, Any]:
    return {
        "placement": unstructure(placement),
        "bytes": {device: placement.bytes_on(device) for device in placement.devices},
        "forward": attrs.asdict(big.estimate(placement, speeds)),
        "speeds": attrs.asdict(speeds),
    }
