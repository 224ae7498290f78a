"""Launch files: what they say, how they are read, combined with flags, and written."""

__all__: list[str] = []
