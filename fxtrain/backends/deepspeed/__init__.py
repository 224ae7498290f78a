"""ZeRO by DeepSpeed."""

__all__: list[str] = []
