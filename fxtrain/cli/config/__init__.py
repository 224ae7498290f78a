"""Launch files: reading, layering, writing, asking, converting."""

from fxtrain.cli.config.questions import Question, next_question, read_answer, section_of
from fxtrain.interop.accelerate_config import Converted, Note, convert_accelerate
from fxtrain.launch.config.defaults import Machine, detect_machine, suggested
from fxtrain.launch.config.launch_file import LaunchFile, Section, read_launch_file
from fxtrain.launch.config.overlay import leaves, merge, put
from fxtrain.launch.config.rendering import meanings, render
from fxtrain.launch.config.resolution import (
    Setting,
    Settings,
    find_file,
    from_environment,
    from_flags,
    resolve,
)

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
    "detect_machine",
    "find_file",
    "from_environment",
    "from_flags",
    "leaves",
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
