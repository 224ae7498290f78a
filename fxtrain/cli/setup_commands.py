"""`fxtrain env`, `test` and `tpu-config`: the setup of this machine and of others."""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._display import counted
from fxtrain._reading import read_text
from fxtrain.choosing.devices import DEVICES, Device, read_device
from fxtrain.cli.output import COUNT, Exit, FilePath, as_json, json_asked, option, report, warn
from fxtrain.cli.tables import print_table
from fxtrain.diagnosis import collect, fact_problems, facts_here
from fxtrain.errors import LaunchError
from fxtrain.launchers import LAUNCHERS, LaunchSpec, describe, find_launcher, run
from fxtrain.launchers.built_in.tpu import setup_command
from fxtrain.launchers.config import from_flags, resolve
from fxtrain.launchers.machine import default_ranks
from fxtrain.launchers.spec import options_from
from fxtrain.state import Plan, dumps, unstructure
from fxtrain.state.files import format_of

_TRIAL = "fxtrain.diagnosis.trial"
_MEASURING = "fxtrain.diagnosis.measuring"


@click.command("env")
@click.option("--config", "-c", "file", default="", help="the launch file to show")
@option("--measure", "measure devices and links, and write them for --device", FilePath(), "FILE")
@option("--ranks -n", "ranks on each machine that are measured at once", COUNT)
@as_json
def ENV(file: str, measure: str | None, ranks: int | None) -> int:
    """Show the setup of this machine, ready to paste into an issue.

    Versions, devices, topology, communication, and the configuration. Values of secrets are
    hidden.

    With --measure, the ranks of the launch file measure matrix products by dtype, memory
    bandwidth, the time of a launch, and all-reduce over each axis of the plan's mesh, in less than
    a minute. FILE (.toml, .json, .yaml) is what `fxtrain plan --choose --device FILE` reads. With
    several machines, run it on each of them.
    """
    if measure is not None:
        return _measure(Path(measure), file, ranks)
    if ranks is not None:
        raise click.UsageError("--ranks needs --measure FILE.")
    groups = collect({**os.environ, "FXTRAIN_CONFIG": file} if file else os.environ)
    parts = [
        "\n".join([f"### {group}", *(f"- {name}: {value}" for name, value in facts.items()), ""])
        for group, facts in groups.items()
    ]
    report(groups, "\n".join(parts))
    return Exit.WELL


def _measure(path: Path, file: str, ranks: int | None) -> int:
    dumps(DEVICES["H100"], format_of(path))  # refuses a suffix before anything runs
    spec, plan = _configured(file, ranks, ())
    words = (str(path.absolute()), dumps(plan))
    if code := _run_here(spec, _MEASURING, words, "fxtrain env --measure"):
        return code
    if not path.is_file():
        warn("Every rank succeeded. The machine of rank 0 writes the file.")
        return Exit.WELL
    device = read_device(path)
    rows = [[name, f"{value:.4g}"] for name, value in _figures(device)]
    report(
        unstructure(device),
        lambda: print_table([device.source, ">"], [*rows, ["written to", str(path)]]),
    )
    return Exit.WELL


def _figures(device: Device) -> list[tuple[str, float]]:
    """The measured figures in the units of data sheets."""
    return [
        *(
            (f"{dtype} {name}, TFLOP/s", rate / 1e12)
            for name, rates in (
                ("products", device.flops),
                ("attention", device.attention_flops),
                ("convolutions", device.convolution_flops),
            )
            for dtype, rate in rates.items()
        ),
        ("memory, GB/s", device.memory_bandwidth / 1e9),
        ("launch, us", device.launch_s * 1e6),
        ("hooks of a collective, us", device.hook_s * 1e6),
        *((f"{kind}, of an all-reduce", n) for kind, n in device.collective_efficiency.items()),
        ("links in a node, GB/s", device.link_bandwidth / 1e9),
        ("latency in a node, us", device.link_latency_s * 1e6),
        ("links between nodes, GB/s", device.node_bandwidth / 1e9),
        ("latency between nodes, us", device.node_latency_s * 1e6),
        ("overlap of links and operators", device.overlap),
    ]


@click.command("test")
@click.option("--config", "-c", "file", default="", help="the launch file")
@click.option("--ranks", "-n", type=click.IntRange(min=1), help="ranks on each machine")
@click.option("--set", "words", multiple=True, metavar="PATH=VALUE", help="such as launch.nodes=2")
@option("--mib", "size of tensors for bandwidth, in MiB", click.FloatRange(min=0.01), default=4.0)
@as_json
def TEST(file: str, ranks: int | None, words: tuple[str, ...], mib: float) -> int:
    """Test the configured setup on all of its ranks.

    Runs every collective and a short training, and prints latency and bandwidth. The exit code
    is 1 if a check fails. With several machines, run it on each of them, as you would
    fxtrain launch; the machine of rank 0 prints the results.
    """
    spec, plan = _configured(file, ranks, words)
    with tempfile.TemporaryDirectory(prefix="fxtrain-test-") as folder:
        out = Path(folder) / "results.json"
        if code := _run_here(spec, _TRIAL, (str(out), dumps(plan), str(mib)), "fxtrain test"):
            return code
        if not out.is_file():
            warn("Every rank succeeded. The machine of rank 0 prints the results.")
            return Exit.WELL
        results = json.loads(out.read_text(encoding="utf-8"))
    report(results, lambda: _print(results))
    return Exit.FOUND if results["problems"] else Exit.WELL


def _configured(file: str, ranks: int | None, words: Sequence[str]) -> tuple[LaunchSpec, Plan]:
    """The launch of a file with flags, and its plan."""
    flags = from_flags([*words, *([f"launch.ranks={ranks}"] if ranks else [])])
    config = resolve(file=file, env=os.environ, flags=flags)
    spec = config.launch
    if "ranks" not in config.values["launch"]:
        spec = attrs.evolve(spec, ranks=default_ranks(spec))
    return spec, config.plan


def _run_here(spec: LaunchSpec, module: str, words: tuple[str, ...], name: str) -> int:
    """Run a module of fxtrain on the ranks of a launch; the exit code, 0 if they succeeded."""
    if spec.executable or not find_launcher(spec).here:
        program = shlex.join(["fxtrain", "launch", "-m", module, *words])
        raise LaunchError(
            f"The launcher {spec.launcher!r} starts ranks on other machines, which cannot return "
            f"the results. Launch {name} as a program: {program}"
        )
    if spec.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise LaunchError(
            f"{name} has to run inside a SLURM job, not as a queued one: "
            f"salloc --nodes=... {name} ..."
        )
    ending = run(attrs.evolve(spec, target=module, module=True, args=words))
    if ending.code:
        here = facts_here(os.environ, importlib.import_module("torch"))
        causes = [f"! {problem}" for problem in fact_problems([here], nodes=spec.nodes)]
        warn("\n".join([f"{name}: {describe(ending)}", *causes]))
        return Exit.FOUND
    return Exit.WELL


def _print(results: dict[str, Any]) -> None:
    ranks, nodes = counted(results["ranks"], "rank"), counted(results["nodes"], "node")
    click.echo(
        f"{ranks} on {nodes} ({', '.join(results['hosts'])}), "
        f"{results['device']}, started by {results['launcher']}\n"
    )
    rows = [
        [
            row["name"],
            "yes" if row["right"] else "NO",
            f"{row['latency_us']:.0f}",
            "" if row["gib_per_s"] is None else f"{row['gib_per_s']:.3f}",
        ]
        for row in results["collectives"]
    ]
    print_table(["collective", "right", ">latency, us", ">GiB/s"], rows)
    training = results["training"]
    if training:
        click.echo(
            f"\nTraining: loss {training['first']:.4f} to {training['last']:.4f} in "
            f"{training['steps']} steps, {training['step_ms']:.2f} ms each."
        )
    problems = results["problems"]
    click.echo("\n" + ("\n".join(f"! {problem}" for problem in problems) or "No problems found."))
    sys.stdout.flush()


@click.command("tpu-config")
@click.option("--config", "-c", "file", default="", help="the launch file")
@click.option("--name", default="", help="name of the TPU VM")
@click.option("--zone", default="", help="its zone")
@click.option("--command", "commands", multiple=True, help="a shell command for each host")
@option("--command-file", "a file with one command per line", click.Path(exists=True))
@click.option("--install", default="", metavar="PACKAGE", help="install it first, with pip")
@click.option("--dry", is_flag=True, help="print gcloud's command line and exit")
@as_json
def TPU(
    file: str,
    name: str,
    zone: str,
    commands: tuple[str, ...],
    command_file: str | None,
    install: str,
    dry: bool,  # noqa: FBT001
) -> int:
    """Prepare the hosts of a TPU pod.

    Runs commands on all of them through gcloud. The pod is given by --name and --zone, or by
    launch.options in the launch file if launch.launcher is tpu-pod.
    """
    config = resolve(file=file, env=os.environ)
    said = config.launch.options if config.launch.launcher == "tpu-pod" else None
    named = {key: value for key, value in (("name", name), ("zone", zone)) if value}
    row = LAUNCHERS["tpu-pod"]
    options = options_from(row.options, {**(said or {}), **named}, launcher=row.name)
    lines = read_text(command_file).splitlines() if command_file else []
    argv = setup_command(
        options,
        commands=[*commands, *(line for line in lines if line.strip() and line[:1] != "#")],
        install=install,
    )
    if dry or json_asked():
        report({"argv": argv}, shlex.join(argv))
        return Exit.WELL
    if not shutil.which(argv[0]):
        raise LaunchError("gcloud is not on the PATH. Install the Google Cloud CLI, or add --dry.")
    return Exit.WELL if subprocess.run(argv, check=False).returncode == 0 else Exit.FOUND
