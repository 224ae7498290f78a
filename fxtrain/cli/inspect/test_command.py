"""`fxtrain test`: tests the configured setup."""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._errors import LaunchError
from fxtrain.cli.exit_codes import Exit
from fxtrain.cli.output import as_json, print_json, print_table, warn
from fxtrain.diagnosis import fact_problems, facts_here
from fxtrain.launch import LaunchSpec, describe, find_launcher, run
from fxtrain.launch.config import from_flags, resolve
from fxtrain.launch.machine import slurm_job
from fxtrain.state import Plan, dumps

__all__ = ["TEST"]

_TRIAL = "fxtrain.diagnosis.trial"


@click.command("test")
@click.option("--config", "-c", "file", default="", help="the launch file")
@click.option("--profile", "-p", default="", help="the profile")
@click.option("--ranks", "-n", type=click.IntRange(min=1), help="ranks on each machine")
@click.option("--set", "words", multiple=True, metavar="PATH=VALUE", help="such as launch.nodes=2")
@click.option(
    "--mib",
    type=click.FloatRange(min=0.01),
    default=4.0,
    help="size of the tensors for measuring bandwidth, in MiB; 4 by default",
)
@as_json
def TEST(
    file: str,
    profile: str,
    ranks: int | None,
    words: tuple[str, ...],
    mib: float,
    json_: bool,  # noqa: FBT001
) -> int:
    """Test the configured setup on all of its ranks.

    Runs every collective and a short training, and prints latency and bandwidth. The exit code
    is 1 if a check fails. With several machines, run it on each of them, as you would
    fxtrain launch; the machine of rank 0 prints the results.
    """
    flags = from_flags([*words, *([f"launch.ranks={ranks}"] if ranks else [])])
    settings = resolve(file=file, profile=profile, env=os.environ, flags=flags)
    spec = settings.launch
    if "ranks" not in settings.values.launch:
        accelerators = importlib.import_module("torch").accelerator.device_count()
        spec = attrs.evolve(spec, ranks=max(1, accelerators))
    with tempfile.TemporaryDirectory(prefix="fxtrain-test-") as folder:
        told = _try_out(spec, settings.plan, Path(folder) / "told.json", mib=mib)
    if isinstance(told, int):
        return told
    if json_:
        print_json(told)
    else:
        _print(told)
    return Exit.FOUND if told["problems"] else Exit.WELL


def _try_out(spec: LaunchSpec, plan: Plan, out: Path, *, mib: float) -> dict[str, Any] | int:
    """The report of rank 0, or the exit code if it failed or is on another machine."""
    if spec.executable or not find_launcher(spec).here:
        raise LaunchError(
            f"The launcher {spec.launcher!r} starts ranks on other machines, which cannot return "
            f"the results. Launch the test as a program: fxtrain launch -m {_TRIAL} told.json "
            f"'{{}}' {mib:g}"
        )
    if spec.launcher == "slurm" and not slurm_job(os.environ):
        raise LaunchError(
            "The test has to run inside a SLURM job, not as a queued one: "
            "salloc --nodes=... fxtrain test ..."
        )
    words = (str(out), dumps(plan), str(mib))
    ending = run(attrs.evolve(spec, target=_TRIAL, module=True, args=words))
    if ending.code:
        here = facts_here(os.environ, importlib.import_module("torch"))
        causes = [f"! {one}" for one in fact_problems([here], nodes=spec.nodes)]
        warn("\n".join([f"fxtrain test: {describe(ending)}", *causes]))
        return Exit.FOUND
    if not out.is_file():
        warn("Every rank succeeded. The machine of rank 0 prints the results.")
        return Exit.WELL
    return json.loads(out.read_text(encoding="utf-8"))


def _print(told: dict[str, Any]) -> None:
    click.echo(
        f"{told['ranks']} ranks on {told['nodes']} nodes ({', '.join(told['hosts'])}), "
        f"{told['device']}, started by {told['launcher']}\n"
    )
    rows = [
        [
            row["name"],
            "yes" if row["right"] else "NO",
            f"{row['latency_us']:.0f}",
            "" if row["gib_per_s"] is None else f"{row['gib_per_s']:.3f}",
        ]
        for row in told["collectives"]
    ]
    print_table(["collective", "right", ">latency, us", ">GiB/s"], rows)
    training = told["training"]
    if training:
        click.echo(
            f"\nTraining: loss {training['first']:.4f} to {training['last']:.4f} in "
            f"{training['steps']} steps, {training['step_ms']:.2f} ms each."
        )
    problems = told["problems"]
    click.echo("\n" + ("\n".join(f"! {one}" for one in problems) or "No problems found."))
    sys.stdout.flush()
