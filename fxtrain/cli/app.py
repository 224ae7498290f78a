"""From arguments to a command and an exit code."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import IO, Any

import click
from click.shell_completion import get_completion_class

from fxtrain import __version__
from fxtrain._other_names import hint
from fxtrain.cli.output import Exit
from fxtrain.errors import FxError, LaunchError, escape_unprintable

# By name: where the click command is, as `module:NAME` in this package, and what it does.
COMMANDS = {
    "launch": ("launch_command:LAUNCH", "run a script or module on several ranks"),
    "config": ("config:CONFIG", "write, show and check launch files"),
    "env": ("setup_commands:ENV", "show the setup of this machine"),
    "estimate-memory": ("memory_commands:ESTIMATE", "estimate the memory of a model"),
    "place": ("memory_commands:PLACE", "place a model that does not fit a device"),
    "verify-resume": (
        "rerun_commands:VERIFY_RESUME",
        "check that an interrupted script resumes with equal results",
    ),
    "verify": ("checkpoint_commands:VERIFY", "check every byte of a checkpoint"),
    "merge-weights": ("weights_commands:MERGE", "write a checkpoint's weights as model files"),
    "import": ("weights_commands:IMPORT", "convert a checkpoint of another library"),
    "replay": ("rerun_commands:REPLAY", "run one update of a run again"),
    "tokens": ("tokens_command:TOKENS", "tokenize text, or show files of tokens"),
    "explain": ("explain_command:EXPLAIN", "explain the code at the end of an error"),
    "stacks": ("stacks_commands:STACKS", "ask the ranks of a run where they stand"),
    "diagnose": ("stacks_commands:DIAGNOSE", "show where the ranks of a run stood when it hung"),
    "test": ("setup_commands:TEST", "test the configured setup"),
    "tpu-config": ("setup_commands:TPU", "prepare the hosts of a TPU pod"),
    "plan": ("plan_command:PLAN", "show what a script would need on many ranks"),
    "report": ("run_commands:REPORT", "write an HTML page about tracked runs"),
    "watch": ("run_commands:WATCH", "show a tracked run as it is logged"),
    "profile": ("run_commands:PROFILE", "show where the time of a step went, from traces"),
    "completion": ("app:COMPLETION", "print shell completion"),
}


def load(name: str) -> click.Command:
    """The click command of a name. Its module is imported when it is called, not to list it."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    return getattr(import_module(f"fxtrain.cli.{module}"), attribute)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; those of the process by default.

    Returns:
        The exit code: that of the command, or one of `fxtrain.cli.Exit`.

    Example:
        >>> from fxtrain.cli import main
        >>> main(["launch", "--ranks", "0", "train.py"])
        2
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return int(program().main(words, prog_name="fxtrain", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return int(error.exit_code)
    except click.Abort:
        return int(Exit.INTERRUPTED)


def program() -> click.Group:
    """`fxtrain` itself, with the name and a one-line help of each command."""
    return _Program(
        name="fxtrain",
        help="Run PyTorch training scripts on any number of ranks.",
        commands={name: click.Command(name, help=help) for name, (_, help) in COMMANDS.items()},
        params=[
            click.Option(
                ["--version"], is_flag=True, is_eager=True, expose_value=False,
                callback=_say_version, help="Show the versions and exit.",
            ),
        ],
        context_settings={"max_content_width": 100},
    )  # fmt: skip


# What other programs call `launch`.
_LAUNCH = ("run", "train", "start", "exec", "torchrun", "notebook-launcher")


def _plan_hint(option: str) -> str:
    """Where a field of a plan is written that was typed as an option."""
    field = option.lstrip("-").removeprefix("plan.").replace("-", "_")
    if field not in import_module("fxtrain.state").Plan.__slots__:
        return ""
    return f" Use --set plan.{field}=..., or plan.{field} in a launch file."


class _Program(click.Group):
    """Commands by name; only the requested one is imported."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _LAUNCH:
            words = f"No such command {args[0]!r}. Use fxtrain launch --ranks 2 train.py."
            raise click.UsageError(words, ctx)
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and load(str(name)), rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            other = hint(error.option_name, at="command") or _plan_hint(error.option_name)
            if not other or ctx.invoked_subcommand != "launch":
                raise
            words = f"No such option {error.option_name!r}.{other}"
            raise click.NoSuchOption(error.option_name, words, ctx=error.ctx) from None
        except FxError as error:
            kind = type(error).__name__
            raise _UserError(f"fxtrain {ctx.invoked_subcommand}: {kind}: {error}") from error
        except OSError as error:
            if error.filename is None:
                raise
            # A file that cannot be read or written, in any command.
            raise _UserError(
                f"fxtrain {ctx.invoked_subcommand}: {error.filename}: {error.strerror}."
            ) from error


class _UserError(click.ClickException):
    """A mistake of the user, as one message."""

    exit_code = Exit.WRONG

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(escape_unprintable(self.message), file=file, err=file is None)


def _say_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:  # noqa: FBT001
    if not asked or ctx.resilient_parsing:
        return
    python = ".".join(map(str, sys.version_info[:3]))
    metadata = import_module("importlib.metadata")  # a tenth of what --help may take
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    click.echo(f"fxtrain {__version__} (torch {torch}, Python {python})")
    ctx.exit()


_START_UP_LINES = {
    "bash": '~/.bashrc:  eval "$(fxtrain completion bash)"',
    "zsh": '~/.zshrc:  eval "$(fxtrain completion zsh)"',
    "fish": "~/.config/fish/config.fish:  fxtrain completion fish | source",
}


@click.command(
    "completion",
    epilog="\b\nAdd one line to the shell's start-up file:\n"
    + "\n".join(f"  {line}" for line in _START_UP_LINES.values()),
)
@click.argument("shell", type=click.Choice(sorted(_START_UP_LINES)))
def COMPLETION(shell: str) -> None:
    """Print the script with which a shell completes commands, options and file names."""
    kind = get_completion_class(shell)
    if kind is None:
        raise LaunchError(f"The installed click {click.__version__} has no completion for {shell}.")
    click.echo(kind(program(), {}, "fxtrain", "_FXTRAIN_COMPLETE").source())
