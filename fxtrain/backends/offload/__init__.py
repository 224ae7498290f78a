"""Running a model whose tensors are partly on the CPU or on disk."""

__all__: list[str] = []
