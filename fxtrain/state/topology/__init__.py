"""From environment variables to the rank of a process."""

__all__: list[str] = []
