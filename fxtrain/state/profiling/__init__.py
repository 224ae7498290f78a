"""Config of the profiler: which steps are recorded, and what of them."""

__all__: list[str] = []
