"""Records of weights with few bits."""

__all__: list[str] = []
