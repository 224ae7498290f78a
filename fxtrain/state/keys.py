"""Keys of the tensors in a checkpoint: what each is, a point, and its own name.

Checkpoints store them as text; nothing else composes or takes apart that text.
"""

import attrs


@attrs.frozen
class Kind:
    """What some tensors of a checkpoint are.

    Attributes:
        prefix: How their keys begin.

    Example:
        >>> WEIGHTS.key("0.bias"), WEIGHTS.name("module.0.bias"), WEIGHTS.name("grad.0.bias")
        ('module.0.bias', '0.bias', None)
    """

    prefix: str

    def key(self, name: str) -> str:
        """The key of a tensor of this kind."""
        return f"{self.prefix}.{name}"

    def name(self, key: str) -> str | None:
        """The name of a tensor by its key; None if it is of another kind."""
        start = f"{self.prefix}."
        return key[len(start) :] if key.startswith(start) else None


WEIGHTS = Kind("module")  # what the state dict of the user's module has
GRADIENTS = Kind("grad")  # of an open accumulation window
SCALES = Kind("fp8")  # of layers that compute in float8
ROUND = Kind("round")  # of replicas that train independently


def optimizer_key(index: int, *names: str) -> str:
    """The key of what one of a model's optimizers keeps; without names, how such keys begin.

    Example:
        >>> optimizer_key(0, "state")
        'optimizer.0.state'
    """
    return ".".join(["optimizer", str(index), *names])
