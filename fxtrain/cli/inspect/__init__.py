"""Commands that look at machines, models and setups before anything long is started."""

__all__: list[str] = []
