"""Documents of packed rows under pipelines and context parallelism."""

import pytest
import torch
import torch.nn.functional as F

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from tests.cluster._models import PIPELINES
from tests.data._token_files import write_megatron

DOCUMENTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2], [8, 4, 6]]


def _loss(model, batch):
    logits = model(
        input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False
    ).logits
    labels = batch["labels"].flatten()
    total = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    return fx.Weighted(total, (labels != -100).sum())


def _train(ctx, path, strategy):
    """Losses of two updates on packed rows, summed over their tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    plan = fx.Plan(strategy=strategy)
    model = fx.wrap(
        transformers.LlamaForCausalLM(config).double(),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    source = fx.data.MegatronTokens(path=path)
    loader = fx.tokens(
        source, ctx, plan, length=5, batch_size=2, packing=fx.data.BestFit(window_rows=2)
    )
    fns = fx.StepFns(model=model, loss=_loss)
    reports = [fx.step(ctx, batch, fns) for _, batch in zip(range(2), loader, strict=False)]
    return [(float(report.loss), float(report.weight)) for report in reports]


def _train_on(ctx, path, strategy, mesh):
    with on_mesh(ctx, mesh) as placed:
        return _train(placed, path, strategy)


def _refusal(ctx, path):
    plan = fx.Plan(context=fx.CP())
    with on_mesh(ctx, fx.Mesh(context=2)) as placed:
        source = fx.data.MegatronTokens(path=path)
        settings = {"length": 8, "batch_size": 1}
        fx.tokens(source, placed, plan, **settings)
        with pytest.raises(fx.PlanError) as told:
            fx.tokens(source, placed, plan, documents=True, **settings)
        with pytest.raises(fx.PlanError):
            fx.tokens(source, placed, plan, packing=fx.data.BestFit(), **settings)
        return str(told.value)


@pytest.fixture
def path(tmp_path):
    return write_megatron(tmp_path, DOCUMENTS).path


@PIPELINES
@pytest.mark.slow
def test_stages_keep_documents_apart(pair, path):
    with fx.detect({}, device="cpu") as ctx:
        expected = _train(ctx, path, fx.Single())
    for losses in pair.run(_train_on, path, fx.PP(), fx.Mesh(pipeline=2)):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)


def test_context_parallelism_refuses_documents(pair, path):
    for told in pair.run(_refusal, path):
        assert "ring attention has no mask of documents" in told
