"""Tensor, sequence and expert parallelism."""

__all__: list[str] = []
