"""Recording steps with torch's profiler, and computing where their time goes."""

__all__: list[str] = []
