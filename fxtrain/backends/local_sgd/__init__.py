"""Replicas that train independently, and are averaged in rounds."""

__all__: list[str] = []
