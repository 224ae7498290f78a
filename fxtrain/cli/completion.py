"""`fxtrain completion`: shell completion of commands, options and file names."""

from importlib import import_module

import click
from click.shell_completion import get_completion_class

from fxtrain._errors import LaunchError

__all__ = ["COMPLETION"]

_WHERE = {
    "bash": '~/.bashrc:  eval "$(fxtrain completion bash)"',
    "zsh": '~/.zshrc:  eval "$(fxtrain completion zsh)"',
    "fish": "~/.config/fish/config.fish:  fxtrain completion fish | source",
}


@click.command(
    "completion",
    epilog="\b\nAdd one line to the shell's start-up file:\n"
    + "\n".join(f"  {line}" for line in _WHERE.values()),
)
@click.argument("shell", type=click.Choice(sorted(_WHERE)))
def COMPLETION(shell: str) -> None:
    """Print the script with which a shell completes commands, options and file names."""
    kind = get_completion_class(shell)
    if kind is None:
        raise LaunchError(f"The installed click {click.__version__} has no completion for {shell}.")
    program = import_module("fxtrain.cli.app").program()  # this module is loaded by it
    click.echo(kind(program, {}, "fxtrain", "_FXTRAIN_COMPLETE").source())
