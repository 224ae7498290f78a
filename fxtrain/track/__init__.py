"""Trackers: logging a run without slowing it down.

The package is also the function `fx.track`:

>>> import fxtrain as fx, tempfile
>>> with fx.detect(env={}, device="cpu") as ctx:
...     with fx.track(tempfile.mkdtemp(), ctx) as run:
...         run.log({"loss": 0.5}, 1)
"""

import sys

from fxtrain._packages import CallablePackage
from fxtrain.track.opening import track
from fxtrain.track.reading_runs import RunLog, read_run
from fxtrain.track.run import Run
from fxtrain.track.table import TRACKERS, trackers
from fxtrain.track.tracker import At, Start, Target, Tracker
from fxtrain.track.writer import Patience

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

sys.modules[__name__].__class__ = CallablePackage
