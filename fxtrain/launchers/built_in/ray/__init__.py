"""Ray."""

__all__: list[str] = []
