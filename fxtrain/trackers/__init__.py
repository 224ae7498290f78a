"""Trackers: logging a run without slowing it down.

>>> import fxtrain as fx, tempfile
>>> with fx.detect(env={}, device="cpu") as ctx:
...     with fx.track(tempfile.mkdtemp(), ctx) as run:
...         run.log({"loss": 0.5}, 1)
"""

import sys

from fxtrain._packages import Package
from fxtrain.trackers.opening import track
from fxtrain.trackers.reading_runs import RunLog, read_run
from fxtrain.trackers.run import Run
from fxtrain.trackers.table import TRACKERS, trackers
from fxtrain.trackers.tracker import At, Start, Target, Tracker
from fxtrain.trackers.writer import Patience

__all__ = [
    "At",
    "Patience",
    "Run",
    "RunLog",
    "Start",
    "TRACKERS",
    "Target",
    "Tracker",
    "read_run",
    "track",
    "trackers",
]

sys.modules[__name__].__class__ = Package
