"""Quantized weights, and linear layers that compute in float8."""

__all__: list[str] = []
