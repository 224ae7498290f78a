"""What all strategies on torch share: optimizers, state by name, gradients, module changes."""

__all__: list[str] = []
