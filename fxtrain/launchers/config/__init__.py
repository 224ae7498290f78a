"""Launch files: their records, and how they are read, combined with flags, and written."""

from fxtrain.launchers.config.defaults import Machine, detect_machine, suggested
from fxtrain.launchers.config.launch_file import LaunchFile, Section, read_launch_file
from fxtrain.launchers.config.rendering import render
from fxtrain.launchers.config.resolution import (
    Setting,
    Settings,
    find_file,
    from_flags,
    resolve,
)
from fxtrain.state.parsing import from_environment, leaves, merge, put

__all__ = [
    "LaunchFile",
    "Machine",
    "Section",
    "Setting",
    "Settings",
    "detect_machine",
    "find_file",
    "from_environment",
    "from_flags",
    "leaves",
    "merge",
    "put",
    "read_launch_file",
    "render",
    "resolve",
    "suggested",
]
