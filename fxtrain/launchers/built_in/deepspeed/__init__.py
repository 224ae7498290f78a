"""DeepSpeed's launcher."""

__all__: list[str] = []
