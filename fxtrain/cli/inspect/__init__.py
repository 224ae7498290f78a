"""Commands that inspect machines, models and setups before a long run."""

__all__: list[str] = []
