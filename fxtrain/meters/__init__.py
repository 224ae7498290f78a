"""Meters: speed, memory, and what share of a device's peak a run reaches."""

from fxtrain.meters.device_memory import Memory, memory

__all__ = ["Memory", "memory"]
