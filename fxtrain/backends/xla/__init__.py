"""torch_xla: one graph per step."""

__all__: list[str] = []
