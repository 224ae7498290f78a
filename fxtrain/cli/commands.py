"""The commands of `fxtrain`: each is one line here and one module."""

import importlib
from typing import NamedTuple

import click


class CommandEntry(NamedTuple):
    """One command. Its module is imported when it is called, not to list it.

    A tuple, since importing attrs would take a fifth of the time of `fxtrain --help`.

    Attributes:
        name: The name after `fxtrain`.
        home: Where its click command is, as `module:NAME`.
        help: What it does, in one line.
    """

    name: str
    home: str
    help: str


COMMANDS: tuple[CommandEntry, ...] = (
    CommandEntry(
        "launch", "fxtrain.cli.launch_command:LAUNCH", "run a script or module on several ranks"
    ),
    CommandEntry(
        "config", "fxtrain.cli.config.command:CONFIG", "write, show and check launch files"
    ),
    CommandEntry("env", "fxtrain.cli.setup_commands:ENV", "show the setup of this machine"),
    CommandEntry(
        "estimate-memory",
        "fxtrain.cli.memory_commands:ESTIMATE",
        "estimate the memory of a model",
    ),
    CommandEntry(
        "place",
        "fxtrain.cli.memory_commands:PLACE",
        "place a model that does not fit a device",
    ),
    CommandEntry(
        "verify-resume",
        "fxtrain.cli.resume_command:VERIFY_RESUME",
        "check that an interrupted script resumes with equal results",
    ),
    CommandEntry(
        "verify", "fxtrain.cli.checkpoint_commands:VERIFY", "check every byte of a checkpoint"
    ),
    CommandEntry(
        "merge-weights",
        "fxtrain.cli.checkpoint_commands:MERGE",
        "write a checkpoint's weights as model files",
    ),
    CommandEntry(
        "import",
        "fxtrain.cli.checkpoint_commands:IMPORT",
        "convert a checkpoint of another library",
    ),
    CommandEntry("replay", "fxtrain.cli.resume_command:REPLAY", "run one update of a run again"),
    CommandEntry(
        "explain",
        "fxtrain.cli.explain_command:EXPLAIN",
        "explain the code at the end of an error",
    ),
    CommandEntry(
        "stacks", "fxtrain.cli.stacks_commands:STACKS", "ask the ranks of a run where they stand"
    ),
    CommandEntry(
        "diagnose",
        "fxtrain.cli.stacks_commands:DIAGNOSE",
        "show where the ranks of a run stood when it hung",
    ),
    CommandEntry("test", "fxtrain.cli.setup_commands:TEST", "test the configured setup"),
    CommandEntry("tpu-config", "fxtrain.cli.setup_commands:TPU", "prepare the hosts of a TPU pod"),
    CommandEntry(
        "plan", "fxtrain.cli.plan_command:PLAN", "show what a script would need on many ranks"
    ),
    CommandEntry(
        "report", "fxtrain.cli.run_commands:REPORT", "write an HTML page about tracked runs"
    ),
    CommandEntry("watch", "fxtrain.cli.run_commands:WATCH", "show a tracked run as it is logged"),
    CommandEntry(
        "compare-precision",
        "fxtrain.cli.compare_command:COMPARE",
        "compare what a model computes under several plans",
    ),
    CommandEntry(
        "profile",
        "fxtrain.cli.run_commands:PROFILE",
        "show where the time of a step went, from traces",
    ),
    CommandEntry("completion", "fxtrain.cli.app:COMPLETION", "print shell completion"),
)


def load(row: CommandEntry) -> click.Command:
    """The click command of an entry.

    Effects:
        Imports its module.
    """
    module, _, name = row.home.partition(":")
    return getattr(importlib.import_module(module), name)
