"""Keys of the tensors that a checkpoint has of a model, and their text in its manifest.

Strategies put tensors into a `ModelState` by key and ask a `StateReader` for them by key. In
checkpoints only `fxtrain.checkpoint` writes keys as text, with `encode_key`, and reads that text,
with `decode_key`. The records of `fxtrain replay`, which have no model, use `str` and `Key.read`.
"""

import attrs

WEIGHTS = "module"  # what the state dict of the user's module has
OPTIMIZER = "optimizer"  # the number of an optimizer, and what it keeps for a parameter
SCALES = "fp8"  # of layers that compute in float8
GRADIENTS = "grad"  # of an open accumulation window: means over the ranks, or what a rank has
UNREDUCED = "unreduced"  # gradients of the window that a rank has not sent yet
PLACEMENTS = "placements"  # how a rank's gradients are placed
BEFORE = "before"  # buffers as they were before the window
SUMS = "tally"  # of the window
COUNTS = "counts"  # of the window
ROUND = "round"  # of replicas that train independently

VALUES = "values"  # tensors in the values of a model's state
EXTRA = "extra"  # the user's state
RANDOM = "random"  # states of random generators
_OF_NO_MODEL = frozenset({EXTRA, RANDOM})


@attrs.frozen(order=True)
class Key:
    """What a tensor in a checkpoint is.

    Attributes:
        kind: What tensors with such keys are, such as "module" for the weights of a module; a
            strategy may have kinds of its own. Without dots.
        name: Which of them it is, such as the name of a parameter; empty if there is one.

    Example:
        >>> from fxtrain.state import Key
        >>> str(Key("module", "0.bias")), Key.of("optimizer", 0, "0.bias", "exp_avg").name
        ('module.0.bias', '0.0.bias.exp_avg')
    """

    kind: str
    name: str = ""

    @classmethod
    def of(cls, kind: str, *names: object) -> "Key":
        """A key with several names, such as the number of an optimizer and that of a parameter."""
        return cls(kind, ".".join(map(str, names)))

    @classmethod
    def read(cls, text: str) -> "Key":
        """The key whose text this is."""
        kind, _, name = text.partition(".")
        return cls(kind, name)

    def __str__(self) -> str:
        return encode_key("", self)


def encode_key(model: str, key: Key) -> str:
    """The name of a tensor in a manifest.

    Args:
        model: The name of its model; empty for the user's state and random states.

    Example:
        >>> encode_key("model", Key(WEIGHTS, "0.bias")), encode_key("", Key(RANDOM, "torch"))
        ('model/module.0.bias', 'random.torch')
    """
    text = f"{key.kind}.{key.name}" if key.name else key.kind
    return f"{model}/{text}" if model else text


def decode_key(text: str) -> tuple[str, Key]:
    """The model and the key that `encode_key` was given.

    Example:
        >>> decode_key("model/module.0.bias")
        ('model', Key(kind='module', name='0.bias'))
    """
    model, slash, rest = text.partition("/")
    # Names in the user's state may contain a slash.
    if not slash or text.partition(".")[0] in _OF_NO_MODEL:
        model, rest = "", text
    kind, _, name = rest.partition(".")
    return model, Key(kind, name)
