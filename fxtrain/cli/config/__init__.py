"""Launch files: reading, layering, writing, asking, converting."""

from fxtrain.cli.config._accelerate import Converted, Note, convert_accelerate
from fxtrain.cli.config._file import LaunchFile, Section, read_launch_file
from fxtrain.cli.config._machine import Machine, look, suggested
from fxtrain.cli.config._merge import leaves, merge, put
from fxtrain.cli.config._questions import Question, next_question, read_answer, section_of
from fxtrain.cli.config._resolve import (
    Setting,
    Settings,
    find_file,
    from_environment,
    from_flags,
    resolve,
)
from fxtrain.cli.config._write import meanings, render

__all__ = [
    "Converted",
    "LaunchFile",
    "Machine",
    "Note",
    "Question",
    "Section",
    "Setting",
    "Settings",
    "convert_accelerate",
    "find_file",
    "from_environment",
    "from_flags",
    "leaves",
    "look",
    "meanings",
    "merge",
    "next_question",
    "put",
    "read_answer",
    "read_launch_file",
    "render",
    "resolve",
    "section_of",
    "suggested",
]
