"""Trackers: logging a run without slowing it down.

>>> import fxtrain as fx, tempfile
>>> with fx.detect(env={}, device="cpu") as ctx:
...     with fx.track(tempfile.mkdtemp(), ctx) as run:
...         run.log({"loss": 0.5}, 1)
"""

from fxtrain.trackers.json_lines import JsonLines, RunLog, read_run
from fxtrain.trackers.libraries.aim import Aim
from fxtrain.trackers.libraries.clearml import ClearML
from fxtrain.trackers.libraries.comet import Comet
from fxtrain.trackers.libraries.dvclive import DVCLive
from fxtrain.trackers.libraries.mlflow import MLflow
from fxtrain.trackers.libraries.swanlab import SwanLab
from fxtrain.trackers.libraries.tensorboard import TensorBoard
from fxtrain.trackers.libraries.trackio import Trackio
from fxtrain.trackers.libraries.wandb import WandB
from fxtrain.trackers.opening import TRACKERS, track, trackers
from fxtrain.trackers.run import Run
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
__dir__ = __all__.copy  # for completion
