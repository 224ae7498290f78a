"""What a wrapped model answers to names of its module, to copies and to tools, on each rank."""

import copy
import pickle

import torch
from torch.optim.swa_utils import AveragedModel

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests.cluster._matrix import PROMPT
from tests.cluster._models import llama

# Of the dtype in which a strategy may hold parameters that it was given in another.
DTYPES = {"float64", "float32", "bfloat16"}


def names(ctx, options, mesh, dtype):
    with on_mesh(ctx, mesh) as placed:
        return _names(fx.wrap(llama().to(dtype), placed, fx.Plan(**options), optimizer=_sgd))


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _names(model):
    module = model.module
    found = {
        "training": (model.training, model.eval().training, model.train().training),
        "device": model.device == model.ctx.device,
        "dtype": str(model.dtype).removeprefix("torch.") in DTYPES,
        "config": model.config is module.config,
        "parameters": dict(model.named_parameters()) == dict(module.named_parameters()),
        "modules": dict(model.named_modules()) == dict(module.named_modules()),
        "lacks": [hasattr(model, name) for name in ("lm_head", "zero_grad", "conv1")],
    }
    state = _answer(lambda: model.state_dict())
    generate = _answer(lambda: model.generate(PROMPT, max_new_tokens=4, do_sample=False).tolist())
    whole = {name: tensor.clone() for name, tensor in fx.weights(model)}
    if isinstance(state, dict):
        state = {name: torch.equal(state[name], whole[name]) for name in whole} == dict.fromkeys(
            whole, True
        )
    with fx.gathered(model) as net:
        wanted = net.generate(PROMPT, max_new_tokens=4, do_sample=False).tolist()
    if isinstance(generate, list):
        generate = generate == wanted
    copies = {
        "deepcopy": _answer(lambda: copy.deepcopy(model)),
        "AveragedModel": _answer(lambda: AveragedModel(model)),
        "pickle": _answer(lambda: pickle.dumps(model)),
    }
    return found | {"state_dict": state, "generate": generate, **copies, "advice": _advice(model)}


def _answer(call):
    try:
        return call()
    except (fx.FxError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _advice(model):
    """Whether what the message about copies says can be done."""
    if "gathered" in _answer(lambda: copy.deepcopy(model)):
        with fx.gathered(model) as net:
            copied = copy.deepcopy(net)
        return set(dict(copied.named_parameters())) >= set(dict(model.named_parameters()))
    average = AveragedModel(model.module)
    average.update_parameters(model.module)
    values = zip(average.module.parameters(), model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in values)
