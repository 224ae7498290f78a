"""Processes that could own a lock: one that has ended, and one on another machine."""

import subprocess

import attrs

from fxtrain.checkpoint.folder_lock import this_process


def ended():
    """A process of this machine that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return attrs.evolve(this_process(), pid=process.pid, started="1")


def elsewhere():
    return attrs.evolve(this_process(), machine="another", host="node7")
