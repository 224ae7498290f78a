"""Measure what a training loop needs: dry runs without hardware, and profiles of real steps.

>>> import fxtrain as fx, tempfile
>>> spec = fx.Profile(folder=tempfile.mkdtemp(), wait=0, warmup=0, active=1)
>>> with fx.detect(env={}, device="cpu") as ctx, fx.profile(ctx, spec) as trace:
...     trace.step()
"""

from fxtrain._display import read_bytes, show_bytes
from fxtrain.profiling.failures import (
    Failures,
    Goodput,
    RunTimes,
    checkpoint_bytes,
    goodput,
    simulate_run,
)
from fxtrain.profiling.rehearsal import dry_run, place, rehearse
from fxtrain.profiling.step_times import RankTimes, StepTimes, Summary, summary
from fxtrain.profiling.tables import plot, table
from fxtrain.profiling.tracing import Trace, profile

__all__ = [
    "Failures",
    "Goodput",
    "RankTimes",
    "RunTimes",
    "StepTimes",
    "Summary",
    "Trace",
    "checkpoint_bytes",
    "dry_run",
    "goodput",
    "place",
    "plot",
    "profile",
    "read_bytes",
    "rehearse",
    "show_bytes",
    "simulate_run",
    "summary",
    "table",
]
__dir__ = __all__.copy  # for completion
