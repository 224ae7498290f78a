"""Measure what a training loop needs: dry runs without hardware, and profiles of real steps.

The package is also the function `fx.profile`:

>>> import fxtrain as fx, tempfile
>>> spec = fx.Profile(folder=tempfile.mkdtemp(), wait=0, warmup=0, active=1)
>>> with fx.detect(env={}, device="cpu") as ctx, fx.profile(ctx, spec) as trace:
...     trace.step()
"""

import sys

from fxtrain._byte_units import read_bytes, show_bytes
from fxtrain._packages import CallablePackage
from fxtrain.profile.fake_ranks import place
from fxtrain.profile.memory_plot import plot
from fxtrain.profile.rehearsal import dry_run, rehearse
from fxtrain.profile.tables import table
from fxtrain.profile.tracing.opening import Trace, profile
from fxtrain.profile.tracing.summaries import RankTimes, StepTimes, Summary, summary

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

sys.modules[__name__].__class__ = CallablePackage
