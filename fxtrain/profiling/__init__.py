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
    daly_goodput,
    daly_interval_s,
    goodput,
    goodput_table,
    plot_goodput,
    simulate_run,
    young_interval_s,
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
    "daly_goodput",
    "daly_interval_s",
    "dry_run",
    "goodput",
    "goodput_table",
    "place",
    "plot",
    "plot_goodput",
    "profile",
    "read_bytes",
    "rehearse",
    "show_bytes",
    "simulate_run",
    "summary",
    "table",
    "young_interval_s",
]
