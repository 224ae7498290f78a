"""Pipelines of transformers' models train as in one process."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from tests.cluster._models import PIPELINES, gpt2, t5

pytestmark = PIPELINES

# Models of transformers, aux, evaluation, traffic, checkpoints.


MODELS = {"gpt2": gpt2, "t5": t5}


def _tokens():
    return torch.arange(64).reshape(8, 8) * 7 % 23 + 1


def _model_loss(model, batch):
    out = model(input_ids=batch[0], labels=batch[0])
    right = out.logits.argmax(-1) == batch[0]
    shares = right.double().mean(0)  # of each place
    return out.loss, {
        **{"right": right.sum(), "rows": out.logits[:, 0, 0], "mean": out.loss},
        **{"counts": batch[0].flatten().bincount(minlength=25), "shares": shares},
    }


def _sgd(params):
    return torch.optim.SGD(params, lr=0.3)


def _transformers(ctx, name, split):
    placed = fx.detect({}, device="cpu", mesh=fx.Mesh(pipeline=2), timeout_s=60)
    plan = fx.Plan(strategy=fx.PP(split=split), clip_norm=0.5)
    model = fx.wrap(MODELS[name](), placed, plan, optimizer=_sgd)
    loader = fx.shard(DataLoader(TensorDataset(_tokens()), batch_size=4), placed, plan)
    fns = fx.StepFns(model=model, loss=_model_loss)
    reports = [fx.step(placed, batch, fns) for epoch in loader.epochs(2) for batch in epoch]
    told = [(float(r.loss), float(r.grad_norm), r.aux) for r in reports]
    with torch.no_grad():
        logits = model.eval()(input_ids=_tokens()[:3], labels=_tokens()[:3]).logits
    return told, logits, {n: p.detach() for n, p in fx.unwrap(model).named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "split"), [("gpt2", ()), ("t5", ("decoder.block.0",))])
def test_models_of_transformers_train_as_in_one_process(pair, name, split):
    net, wanted = MODELS[name](), []
    optimizer = _sgd(net.parameters())
    for _ in range(2):
        for part in _tokens().split(4):
            loss, aux = _model_loss(net, [part])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            wanted.append(
                (float(loss.detach()), float(norm), {k: v.detach() for k, v in aux.items()})
            )
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        out = net(input_ids=_tokens()[:3], labels=_tokens()[:3]).logits
    for told, logits, parameters in pair.run(_transformers, name, split):
        torch.testing.assert_close(told, wanted, rtol=1e-6, atol=1e-8)  # a loss in fp32
        torch.testing.assert_close(logits, out, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(parameters, dict(net.named_parameters()), rtol=1e-6, atol=1e-8)
