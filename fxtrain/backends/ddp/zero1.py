"""Optimizer states shared out over replicas (ZeRO-1), by torch's ZeroRedundancyOptimizer."""

import copy
from types import MethodType
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from fxtrain.state import DistContext

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Updates some parameters with the optimizer that it was made of, and gets the others sent.

    torch takes the class of an optimizer and makes one over a rank's parameters; it takes a
    function as well. Here that leaves the user's own optimizer with this rank's parameters, so
    that any optimizer will do, whatever arguments it was made with. Its groups, which schedulers
    and checkpoints look at, are all of them.
    """

    def __init__(self, made: torch.optim.Optimizer, data: DistContext) -> None:
        groups = [copy.copy(group) for group in made.param_groups]
        kinds = {p.dtype for group in groups for p in group["params"]}
        super().__init__(
            groups,
            lambda own: _keep_groups(made, own),  # type: ignore[arg-type]
            process_group=data.comm.group,
            # One message per rank; torch's buckets take one dtype only.
            parameters_as_bucket_view=len(kinds) == 1,
        )
        self.defaults = made.defaults  # some schedulers look there
        self._optimizer_step_pre_hooks.update(made._optimizer_step_pre_hooks)
        self._optimizer_step_post_hooks.update(made._optimizer_step_post_hooks)

    def _verify_same_dense_param_type(self) -> None:
        """torch asks for one dtype for the sake of its buckets, which others do without."""

    @property
    def part_of_rank(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's parameters."""
        return self.optim


def _keep_groups(
    made: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Leave an optimizer only these groups of its parameters."""
    made.param_groups = groups
    kept = {parameter for group in groups for parameter in group["params"]}
    for parameter in [one for one in made.state if one not in kept]:
        del made.state[parameter]  # some begin with a state of zeros
    step: Any = type(made).step
    if getattr(step, "hooked", False):  # by torch: hooks are to see one step, that of all ranks
        made.step = MethodType(step.__wrapped__, made)
    return made
