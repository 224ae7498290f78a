"""Measure what a training loop needs, without running it on real hardware."""

from fxtrain._byte_units import read_bytes, show_bytes
from fxtrain.profile.fake_ranks import place
from fxtrain.profile.memory_plot import plot
from fxtrain.profile.rehearsal import dry_run, rehearse
from fxtrain.profile.tables import table

__all__ = ["dry_run", "place", "plot", "read_bytes", "rehearse", "show_bytes", "table"]
