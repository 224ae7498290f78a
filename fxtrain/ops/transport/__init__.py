"""How trees are sent in collectives: packets, exchanges and cached layouts."""

__all__: list[str] = []
