"""Trackers of other libraries, each imported when a run is opened with it."""

__all__: list[str] = []
