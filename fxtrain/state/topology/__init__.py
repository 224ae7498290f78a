"""From environment variables to the place of a rank."""

__all__: list[str] = []
