"""How trees are sent in collectives: packets, exchanges, cached layouts and groups of ranks."""

__all__: list[str] = []
