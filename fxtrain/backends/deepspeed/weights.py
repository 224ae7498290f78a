"""The full tensors of a model under DeepSpeed, in full precision and the user's dtypes."""

import functools
from collections.abc import Callable

import attrs
import torch
from torch import Tensor, nn

from fxtrain._errors import PlanError
from fxtrain.backends.core.weights import from_first_rank, in_user_dtypes, torch_weights
from fxtrain.backends.deepspeed.engine_state import fill_full
from fxtrain.backends.deepspeed.master_values import full_value, plain_masters
from fxtrain.ops.whole_tensors import weights_of
from fxtrain.state import Part, Weight, Wrapped


def engine_weights(model: Wrapped) -> dict[str, Weight]:
    """The tensors of the module by name; parameters are gathered from their masters.

    Raises:
        PlanError: AutoTP has replaced layers.
    """
    if model.ctx.mesh.tensor > 1:
        raise PlanError(
            "DeepSpeed(tensor_parallel=...): AutoTP has replaced layers of the module by layers "
            "with a part of each weight. Write full weights with "
            "model.engine.save_16bit_model(folder)."
        )
    if model.engine is model.module:
        return torch_weights(model)
    masters = plain_masters(model.engine.optimizer)
    fill = fill_full(model)
    found = weights_of(model.module)
    for name, weight in found.items():
        if isinstance(weight.like, nn.Parameter):
            dtype = model.formats.get(name, weight.dtype)
            found[name] = attrs.evolve(
                weight,
                shape=tuple(getattr(weight.like, "ds_shape", weight.shape)),
                dtype=dtype,
                gather=functools.partial(_gathered, weight.like, masters, dtype),
                fill=functools.partial(_fill, weight.like, fill),
                together=True,
            )
        else:
            found[name] = from_first_rank(weight, model.ctx.axis("data"))
    return in_user_dtypes(found, model)


def _gathered(
    parameter: nn.Parameter, masters: dict[nn.Parameter, Tensor], dtype: torch.dtype
) -> Tensor:
    return full_value(parameter, masters).to(dtype)


def _fill(
    parameter: nn.Parameter,
    fill: Callable[[Tensor, Tensor], None],
    read: Callable[[Part | None], Tensor],
) -> None:
    fill(parameter, read(None))
