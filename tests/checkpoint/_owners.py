"""Processes that could own a lock: one that has ended, and one on another machine."""

import subprocess

from fxtrain.checkpoint.folder_lock import this_process


def ended():
    """A process of this machine that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return {**this_process(), "pid": process.pid}


def elsewhere():
    return {**this_process(), "machine": "another", "host": "node7"}
