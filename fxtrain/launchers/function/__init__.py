"""fx.launch: a function on several ranks."""

__all__: list[str] = []
