"""torch's elastic launcher, run in this process."""

__all__: list[str] = []
