"""`fxtrain env`, `test` and `tpu-config`: the setup of this machine and of others."""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._display import counted
from fxtrain._reading import read_text
from fxtrain.cli.output import Exit, as_json, json_asked, option, print_table, report, warn
from fxtrain.diagnosis import collect, fact_problems, facts_here
from fxtrain.errors import LaunchError
from fxtrain.launchers import LAUNCHERS, LaunchSpec, describe, find_launcher, run
from fxtrain.launchers.built_in.tpu import setup_command
from fxtrain.launchers.config import from_flags, resolve
from fxtrain.launchers.machine import default_ranks
from fxtrain.launchers.spec import options_from
from fxtrain.state import Plan, dumps

_TRIAL = "fxtrain.diagnosis.trial"


@click.command("env")
@click.option("--config", "-c", "file", default="", help="the launch file to show")
@as_json
def ENV(file: str) -> None:
    """Show the setup of this machine, ready to paste into an issue.

    Versions, devices, topology, communication, and the configuration. Values of secrets are
    hidden.
    """
    groups = collect({**os.environ, "FXTRAIN_CONFIG": file} if file else os.environ)
    parts = [
        "\n".join([f"### {group}", *(f"- {name}: {value}" for name, value in facts.items()), ""])
        for group, facts in groups.items()
    ]
    report(groups, "\n".join(parts))


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
    flags = from_flags([*words, *([f"launch.ranks={ranks}"] if ranks else [])])
    config = resolve(file=file, env=os.environ, flags=flags)
    spec = config.launch
    if "ranks" not in config.values["launch"]:
        spec = attrs.evolve(spec, ranks=default_ranks(spec))
    with tempfile.TemporaryDirectory(prefix="fxtrain-test-") as folder:
        results = _try_out(spec, config.plan, Path(folder) / "results.json", mib=mib)
    if isinstance(results, int):
        return results
    report(results, lambda: _print(results))
    return Exit.FOUND if results["problems"] else Exit.WELL


def _try_out(spec: LaunchSpec, plan: Plan, out: Path, *, mib: float) -> dict[str, Any] | int:
    """The report of rank 0, or the exit code if it failed or is on another machine."""
    if spec.executable or not find_launcher(spec).here:
        raise LaunchError(
            f"The launcher {spec.launcher!r} starts ranks on other machines, which cannot return "
            f"the results. Launch the test as a program: fxtrain launch -m {_TRIAL} results.json "
            f"'{{}}' {mib:g}"
        )
    if spec.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise LaunchError(
            "The test has to run inside a SLURM job, not as a queued one: "
            "salloc --nodes=... fxtrain test ..."
        )
    words = (str(out), dumps(plan), str(mib))
    ending = run(attrs.evolve(spec, target=_TRIAL, module=True, args=words))
    if ending.code:
        here = facts_here(os.environ, importlib.import_module("torch"))
        causes = [f"! {problem}" for problem in fact_problems([here], nodes=spec.nodes)]
        warn("\n".join([f"fxtrain test: {describe(ending)}", *causes]))
        return Exit.FOUND
    if not out.is_file():
        warn("Every rank succeeded. The machine of rank 0 prints the results.")
        return Exit.WELL
    return json.loads(out.read_text(encoding="utf-8"))


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
