"""`fxtrain tpu-config`: commands on all hosts of a TPU pod, to prepare them."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

import attrs
import click

from fxtrain._errors import LaunchError
from fxtrain._reading import read_text
from fxtrain.cli.exit_codes import Exit
from fxtrain.cli.output import as_json, print_json
from fxtrain.launch import LAUNCHERS, TpuPodOptions, options_from, pod_command
from fxtrain.launch.config import from_flags, resolve

__all__ = ["TPU", "setup_command"]


def setup_command(
    options: TpuPodOptions, *, commands: Sequence[str] = (), install: str = ""
) -> tuple[str, ...]:
    """gcloud's command line that prepares the hosts of a pod. One failing command ends it.

    Args:
        options: Which pod; its `setup` runs first.
        commands: For the shell of each host, in order.
        install: What pip installs there before, such as `fxtrain`; empty for nothing.

    Raises:
        LaunchError: the pod has no name, or there is nothing to run.

    Example:
        >>> from fxtrain.cli.inspect import setup_command
        >>> from fxtrain.launch import TpuPodOptions
        >>> setup_command(TpuPodOptions(name="pod"), commands=["ls"])[5:]
        ('pod', '--worker=all', '--command=ls')
    """
    pip = [f"{options.python} -m pip install {shlex.quote(install)}"] if install else []
    wanted = [*pip, *commands]
    if not wanted and not options.setup:
        raise LaunchError(
            "There is nothing to run on the hosts: give --command or --install, or "
            "launch.options.setup in the launch file."
        )
    if not wanted:
        *first, last = options.setup
        return pod_command(attrs.evolve(options, setup=tuple(first)), last)
    return pod_command(options, " && ".join(wanted))


@click.command("tpu-config")
@click.option("--config", "-c", "file", default="", help="the launch file")
@click.option("--profile", "-p", default="", help="the profile")
@click.option("--name", default="", help="name of the TPU VM")
@click.option("--zone", default="", help="its zone")
@click.option("--command", "commands", multiple=True, help="for the shell of each host")
@click.option(
    "--command-file",
    type=click.Path(exists=True, dir_okay=False),
    help="a file with one command a line, instead",
)
@click.option("--install", default="", metavar="PACKAGE", help="install it there first, by pip")
@click.option("--dry", is_flag=True, help="show gcloud's command line, and stop")
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

    Runs commands on all of them through gcloud. The pod is that of launch.options in the launch
    file, where launch.launcher is tpu-pod, or --name and --zone.
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
        raise LaunchError("gcloud is not on the PATH: install the Google Cloud CLI. Or add --dry.")
    return Exit.WELL if subprocess.run(argv, check=False).returncode == 0 else Exit.FOUND
