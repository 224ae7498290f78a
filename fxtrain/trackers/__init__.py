"""Trackers: logging a run without slowing it down.

>>> import fxtrain as fx, tempfile
>>> with fx.detect(env={}, device="cpu") as ctx:
...     with fx.track(tempfile.mkdtemp(), ctx) as run:
...         run.log({"loss": 0.5}, 1)
"""

from fxtrain.trackers.json_lines import JsonLines, RunLog, read_run
from fxtrain.trackers.local_files import Aim, DVCLive, MLflow, TensorBoard
from fxtrain.trackers.opening import TRACKERS, track, trackers
from fxtrain.trackers.run import Run
from fxtrain.trackers.services import ClearML, Comet, SwanLab, Trackio, WandB
from fxtrain.trackers.terminal import Terminal
from fxtrain.trackers.tracker import Entry, Start, Target, Tracker

__all__ = [
    "Aim",
    "ClearML",
    "Comet",
    "DVCLive",
    "Entry",
    "JsonLines",
    "MLflow",
    "Run",
    "RunLog",
    "Start",
    "SwanLab",
    "TRACKERS",
    "Target",
    "TensorBoard",
    "Terminal",
    "Tracker",
    "Trackio",
    "WandB",
    "read_run",
    "track",
    "trackers",
]
