"""Documents of a row attend to themselves alone: packed rows equal separate documents."""

import pytest
import torch
import torch.nn.functional as F

import fxtrain as fx
from tests.data._loaders import world
from tests.data._token_files import write_megatron

DOCUMENTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9, 3, 2]]


def _model():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",  # eager computes its softmax in float32
    )
    return transformers.LlamaForCausalLM(config).double()


def _loss(model, tokens, labels, positions):
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _gradients(model, losses):
    model.zero_grad()
    total = sum(losses)
    total.backward()
    return [total.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


# One row of all documents and padding; several rows, which cut documents; packed by best fit.
@pytest.mark.parametrize(
    ("length", "rows", "packing"),
    [(20, 1, None), (6, 3, None), (6, 3, fx.data.BestFit()), (9, 2, fx.data.BestFit())],
)
def test_transformers_keeps_documents_apart_by_their_positions(tmp_path, length, rows, packing):
    model = _model()
    source = write_megatron(tmp_path, DOCUMENTS)
    (batch,) = fx.tokens(
        source,
        world(1)[0],
        length=length,
        batch_size=rows,
        shuffle=False,
        documents=True,
        packing=packing,
    )
    data = batch.data
    packed = _gradients(model, [_loss(model, data["tokens"], data["labels"], data["positions"])])
    parts = [
        (data["tokens"][row][inside], data["labels"][row][inside])
        for row in range(rows)
        for number in range(int(data["documents"][row].max()) + 1)
        for inside in [data["documents"][row] == number]
    ]
    apart = _gradients(
        model,
        [
            _loss(model, tokens[None], labels[None], torch.arange(len(tokens))[None])
            for tokens, labels in parts
        ],
    )
    assert sum(len(tokens) for tokens, _ in parts) == 17
    torch.testing.assert_close(packed, apart, rtol=1e-12, atol=1e-12)
    # Without positions, tokens also attend to earlier documents.
    mixed = _loss(model, data["tokens"], data["labels"], None)
    assert abs(mixed - packed[0]) > 1e-6


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize(("length", "rows"), [(20, 1), (6, 3)])
def test_documents_attend_to_themselves(tmp_path, length, rows, heads):
    source = write_megatron(tmp_path, DOCUMENTS)
    (batch,) = fx.tokens(
        source, world(1)[0], length=length, batch_size=rows, shuffle=False, documents=True
    )
    positions, documents = batch.data["positions"], batch.data["documents"]
    bounds = fx.data.document_bounds(positions)
    assert bounds.tolist() == [*(positions.flatten() == 0).nonzero().flatten(), positions.numel()]

    torch.manual_seed(0)
    inputs = [
        torch.randn(rows, n, length, 4, dtype=torch.float64, requires_grad=True)
        for n in (2, heads, heads)
    ]
    found = fx.data.document_attention(*inputs, bounds)
    same = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    expected = F.scaled_dot_product_attention(*inputs, attn_mask=same, enable_gqa=True)
    real = (documents >= 0)[:, None, :, None]
    for values in (
        (found * real, expected * real),
        *zip(*map(_gradients_of(inputs, real), (found, expected)), strict=True),
    ):
        torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)


def _gradients_of(inputs, real):
    return lambda output: torch.autograd.grad((output * real).square().sum(), inputs)


def test_documents_attend_in_the_dtype_of_autocast():
    query = torch.randn(2, 2, 3, 4)
    bounds = fx.data.document_bounds(torch.tensor([[0, 1, 2], [0, 1, 0]]))
    with torch.autocast("cpu", torch.bfloat16):
        assert fx.data.document_attention(query, query, query, bounds).dtype is torch.bfloat16
