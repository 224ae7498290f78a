"""`fxtrain env`."""

import os

import click

from fxtrain.cli.output import as_json, print_json
from fxtrain.diagnosis import collect

__all__ = ["ENV"]


@click.command("env")
@click.option("--config", "-c", "file", default="", help="the launch file to show")
@as_json
def ENV(file: str, json_: bool) -> None:  # noqa: FBT001
    """Show the setup of this machine, ready to paste into an issue.

    Versions, devices, topology, communication, and the configuration with its origins. Values
    of secrets are hidden.
    """
    groups = collect({**os.environ, "FXTRAIN_CONFIG": file} if file else os.environ)
    if json_:
        print_json(groups)
        return
    for group, facts in groups.items():
        click.echo(f"### {group}")
        for name, value in facts.items():
            click.echo(f"- {name}: {value}")
        click.echo()
