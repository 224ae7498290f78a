"""Meters: speed, memory, and what share of a device's peak a run reaches."""

from fxtrain.meters.device_memory import Memory, memory
from fxtrain.meters.flops import count_flops, peak_flops
from fxtrain.meters.rates import Meter, timed

__all__ = ["Memory", "Meter", "count_flops", "memory", "peak_flops", "timed"]
