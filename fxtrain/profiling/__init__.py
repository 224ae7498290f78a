"""Measure what a training loop needs: dry runs without hardware, and profiles of real steps.

>>> import fxtrain as fx, tempfile
>>> spec = fx.Profile(folder=tempfile.mkdtemp(), wait=0, warmup=0, active=1)
>>> with fx.detect(env={}, device="cpu") as ctx, fx.profile(ctx, spec) as trace:
...     trace.step()
"""

import sys

from fxtrain._byte_units import read_bytes, show_bytes
from fxtrain._packages import Package
from fxtrain.profiling.rehearsal import dry_run, place, rehearse
from fxtrain.profiling.step_times import RankTimes, StepTimes, Summary, summary
from fxtrain.profiling.tables import plot, table
from fxtrain.profiling.tracing import Trace, profile

__all__ = [
    "RankTimes",
    "StepTimes",
    "Summary",
    "Trace",
    "dry_run",
    "place",
    "plot",
    "profile",
    "read_bytes",
    "rehearse",
    "show_bytes",
    "summary",
    "table",
]

sys.modules[__name__].__class__ = Package
