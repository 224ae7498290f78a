"""`fxtrain tpu-config`: runs commands on all hosts of a TPU pod, to prepare them."""

import os
import shlex
import shutil
import subprocess

import click

from fxtrain._errors import LaunchError
from fxtrain._reading import read_text
from fxtrain.cli.exit_codes import Exit
from fxtrain.cli.output import as_json, print_json
from fxtrain.launch import LAUNCHERS, options_from, setup_command
from fxtrain.launch.config import from_flags, resolve

__all__ = ["TPU"]


@click.command("tpu-config")
@click.option("--config", "-c", "file", default="", help="the launch file")
@click.option("--profile", "-p", default="", help="the profile")
@click.option("--name", default="", help="name of the TPU VM")
@click.option("--zone", default="", help="its zone")
@click.option("--command", "commands", multiple=True, help="a shell command for each host")
@click.option(
    "--command-file",
    type=click.Path(exists=True, dir_okay=False),
    help="a file with one command per line",
)
@click.option("--install", default="", metavar="PACKAGE", help="install it first, with pip")
@click.option("--dry", is_flag=True, help="print gcloud's command line and exit")
@as_json
def TPU(
    file: str,
    profile: str,
    name: str,
    zone: str,
    commands: tuple[str, ...],
    command_file: str | None,
    install: str,
    dry: bool,  # noqa: FBT001
    json_: bool,  # noqa: FBT001
) -> int:
    """Prepare the hosts of a TPU pod.

    Runs commands on all of them through gcloud. The pod is given by --name and --zone, or by
    launch.options in the launch file if launch.launcher is tpu-pod.
    """
    settings = resolve(file=file, profile=profile, env=os.environ, flags=from_flags(()))
    said = settings.launch.options if settings.launch.launcher == "tpu-pod" else None
    given = {key: value for key, value in (("name", name), ("zone", zone)) if value}
    row = LAUNCHERS["tpu-pod"]
    options = options_from(row.options, {**(said or {}), **given}, launcher=row.name)
    lines = read_text(command_file).splitlines() if command_file else []
    argv = setup_command(
        options,
        commands=[*commands, *(line for line in lines if line.strip() and line[:1] != "#")],
        install=install,
    )
    if json_:
        print_json({"argv": argv})
    elif dry:
        click.echo(shlex.join(argv))
    if dry or json_:
        return Exit.WELL
    if not shutil.which(argv[0]):
        raise LaunchError("gcloud is not on the PATH. Install the Google Cloud CLI, or add --dry.")
    return Exit.WELL if subprocess.run(argv, check=False).returncode == 0 else Exit.FOUND
