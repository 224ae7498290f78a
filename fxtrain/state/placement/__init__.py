"""Where the tensors of a model are held, and the config of running a model from there."""

__all__: list[str] = []
