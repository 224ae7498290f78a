"""Replicas: torch's DistributedDataParallel, PowerSGD, ZeRO-1."""

__all__: list[str] = []
