"""The commands of `fxtrain`: each is one line here and one module."""

import importlib
from typing import NamedTuple

import click


class CommandEntry(NamedTuple):
    """One command, a tuple because importing attrs would slow `fxtrain --help`.

    Attributes:
        name: The name after `fxtrain`.
        home: Where its click command is, as `module:NAME`, in `fxtrain.cli`.
        help: What it does, in one line.
    """

    name: str
    home: str
    help: str


COMMANDS = tuple(
    CommandEntry(name, home, help)
    for name, home, help in (
        ("launch", "launch_command:LAUNCH", "run a script or module on several ranks"),
        ("config", "config:CONFIG", "write, show and check launch files"),
        ("env", "setup_commands:ENV", "show the setup of this machine"),
        ("estimate-memory", "memory_commands:ESTIMATE", "estimate the memory of a model"),
        ("place", "memory_commands:PLACE", "place a model that does not fit a device"),
        (
            "verify-resume",
            "resume_command:VERIFY_RESUME",
            "check that an interrupted script resumes with equal results",
        ),
        ("verify", "checkpoint_commands:VERIFY", "check every byte of a checkpoint"),
        (
            "merge-weights",
            "checkpoint_commands:MERGE",
            "write a checkpoint's weights as model files",
        ),
        ("import", "checkpoint_commands:IMPORT", "convert a checkpoint of another library"),
        ("replay", "resume_command:REPLAY", "run one update of a run again"),
        ("tokens", "tokens_command:TOKENS", "tokenize text, or show files of tokens"),
        ("explain", "explain_command:EXPLAIN", "explain the code at the end of an error"),
        ("stacks", "stacks_commands:STACKS", "ask the ranks of a run where they stand"),
        (
            "diagnose",
            "stacks_commands:DIAGNOSE",
            "show where the ranks of a run stood when it hung",
        ),
        ("test", "setup_commands:TEST", "test the configured setup"),
        ("tpu-config", "setup_commands:TPU", "prepare the hosts of a TPU pod"),
        ("plan", "plan_command:PLAN", "show what a script would need on many ranks"),
        ("report", "run_commands:REPORT", "write an HTML page about tracked runs"),
        ("watch", "run_commands:WATCH", "show a tracked run as it is logged"),
        (
            "compare-precision",
            "compare_command:COMPARE",
            "compare what a model computes under several plans",
        ),
        ("profile", "run_commands:PROFILE", "show where the time of a step went, from traces"),
        ("completion", "app:COMPLETION", "print shell completion"),
    )
)


def load(row: CommandEntry) -> click.Command:
    """The click command of an entry. Its module is imported when it is called, not to list it.

    Effects:
        Imports its module.
    """
    module, _, name = row.home.partition(":")
    return getattr(importlib.import_module(f"fxtrain.cli.{module}"), name)
