"""Optimizer states sharded over replicas (ZeRO-1), by torch's ZeroRedundancyOptimizer."""

import copy
from types import MethodType
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from fxtrain.state import DistContext


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Updates this rank's parameters with the user's optimizer, and receives the others.

    torch takes the class of an optimizer and constructs it over a rank's parameters; it takes a
    function as well. Here the function keeps the user's own optimizer, reduced to this rank's
    parameters, so any optimizer with any arguments works. The parameter groups that schedulers and
    checkpoints see contain all parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, data: DistContext) -> None:
        groups = [copy.copy(group) for group in optimizer.param_groups]
        kinds = {p.dtype for group in groups for p in group["params"]}
        super().__init__(
            groups,
            lambda own: _keep_groups(optimizer, own),  # type: ignore[arg-type]
            process_group=data.comm.group,
            # One message per rank; torch's buckets take a single dtype.
            parameters_as_bucket_view=len(kinds) == 1,
        )
        self.defaults = optimizer.defaults  # some schedulers read it
        self._optimizer_step_pre_hooks.update(optimizer._optimizer_step_pre_hooks)
        self._optimizer_step_post_hooks.update(optimizer._optimizer_step_post_hooks)

    def _verify_same_dense_param_type(self) -> None:
        """Accept mixed dtypes: torch needs one dtype only for its buckets, which are not used."""

    @property
    def part_of_rank(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's parameters."""
        return self.optim


def _keep_groups(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Reduce an optimizer to these groups of its parameters."""
    optimizer.param_groups = groups
    parameters = {parameter for group in groups for parameter in group["params"]}
    for parameter in [each for each in optimizer.state if each not in parameters]:
        del optimizer.state[parameter]  # some start with a state of zeros
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # by torch: hooks should see one step, that of all ranks
        optimizer.step = MethodType(step.__wrapped__, optimizer)
    return optimizer
