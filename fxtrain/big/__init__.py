"""Models that do not fit a device: their sizes, and what is placed where."""

__all__: list[str] = []
