"""Expert parallelism: each rank of the tensor axis has whole experts of a mixture."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fxtrain.backends.core.device_mesh import DistributedParameters, distribute_parameter


def split_experts(part: nn.Module, mesh: DeviceMesh, distributed: DistributedParameters) -> None:
    """Give each rank its experts of a module whose expert weights are stacked.

    The ranks see the same tokens. Each computes the contribution of its own experts to the
    output, and one all-reduce sums them, as in a row-wise layer.

    Effects:
        Replaces parameters by DTensors sharded along their first dimension, and adds hooks so that
        forward sees this rank's part of them, of `num_experts` and of the routes.
    """
    names = [name for name, _ in part.named_parameters(recurse=False)]
    for name in names:
        distribute_parameter(part, name, mesh, Shard(0), distributed)
    signature = inspect.signature(part.forward)
    count: Any = part.num_experts
    here = count // mesh.size()
    first = mesh.get_local_rank() * here
    known = {"num_experts": here}
    if hasattr(part, "_is_expert_parallel"):
        known["_is_expert_parallel"] = True  # for transformers: some routes lead to no expert
    kept = {name: getattr(part, name) for name in known}

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tokens, index, weights, *rest = signature.bind(*args, **kwargs).args
        # Attribute lookup finds it before the parameters, which the module still owns.
        shown = vars(module)
        for name in names:
            held: Any = module._parameters[name]
            shown[name] = held.to_local()
        shown.update(known)
        index, weights = _routes(index - first, _summed_back(weights, mesh), here)
        return (_summed_back(tokens, mesh), index, weights, *rest), {}

    def after(module: nn.Module, _: Any, __: Any, out: Any) -> Any:
        shown = vars(module)
        for name in names:
            shown.pop(name, None)
        shown.update(kept)
        if not isinstance(out, Tensor):
            return out  # forward failed, and this hook was called to clean up
        whole = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        return local_copy(whole.redistribute(placements=[Replicate()]))

    part.register_forward_pre_hook(before, with_kwargs=True)
    part.register_forward_hook(after, with_kwargs=True, always_call=True)


def _routes(index: Tensor, weights: Tensor, here: int) -> tuple[Tensor, Tensor]:
    """Route tokens for other ranks' experts to none: one index past the last, with weight zero."""
    away = (index < 0) | (index >= here)
    return index.masked_fill(away, here), weights.masked_fill(away, 0.0)


def _summed_back(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same value on every rank; its gradient is summed over the ranks."""
    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def local_copy(value: DTensor) -> Tensor:
    """This rank's part, as a copy: torch warns if a block returns the view of to_local."""
    part = value.to_local()
    return torch.ops.aten._unsafe_view(part, part.shape)
