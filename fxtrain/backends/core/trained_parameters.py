"""Which parameters of a module require a gradient, and whether that has changed."""

from collections.abc import Sequence
from operator import attrgetter

import attrs
from torch import nn

_REQUIRES_GRAD = attrgetter("requires_grad")
_NAMED = 5  # how many names a message lists


@attrs.frozen(kw_only=True, eq=False)
class TrainedParameters:
    """The parameters of a module, and which of them required a gradient at one time."""

    parameters: tuple[nn.Parameter, ...]
    requires_grad: tuple[bool, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "TrainedParameters":
        """Those of a module, now."""
        parameters = tuple(module.parameters())
        return cls(parameters=parameters, requires_grad=tuple(map(_REQUIRES_GRAD, parameters)))

    def changed(self) -> list[nn.Parameter]:
        """Those that did not require a gradient and do now, and the reverse.

        None if no parameter requires one now: a model may be frozen while another one is trained
        through it.
        """
        now = tuple(map(_REQUIRES_GRAD, self.parameters))
        if now == self.requires_grad or not any(now):
            return []
        pairs = zip(self.parameters, self.requires_grad, now, strict=True)
        return [parameter for parameter, before, after in pairs if before != after]

    @staticmethod
    def named(parameters: Sequence[nn.Parameter], module: nn.Module) -> str:
        """The names of parameters in a module, for messages."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        shown = ", ".join(
            names.get(id(parameter), "a removed one") for parameter in parameters[:_NAMED]
        )
        return shown + f" and {len(parameters) - _NAMED} more" * (len(parameters) > _NAMED)
