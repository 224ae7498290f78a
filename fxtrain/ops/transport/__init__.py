"""How collectives over trees travel: packets, exchanges, kept layouts."""

__all__: list[str] = []
