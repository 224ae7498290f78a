"""Measuring: what a training loop needs, without running it for real."""

from fxtrain.profile._dry_run import dry_run, rehearse
from fxtrain.profile._plot import plot
from fxtrain.profile._table import table
from fxtrain.profile._units import read_bytes, show_bytes
from fxtrain.profile._world import place

__all__ = ["dry_run", "place", "plot", "read_bytes", "rehearse", "show_bytes", "table"]
