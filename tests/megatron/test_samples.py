"""Rows with `compatible` are the samples of Megatron-core's GPTDataset, in its order."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from tests.data._loaders import world

pytestmark = pytest.mark.megatron
_REASON = "needs the package megatron-core"
pytest.importorskip("megatron", reason=_REASON)
blended = pytest.importorskip(
    "megatron.core.datasets.blended_megatron_dataset_builder", reason=_REASON
)
gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason=_REASON)
indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=_REASON)

NUMBERS = itertools.count()
END = 7


def _write(path, sizes, seed):
    """Files that Megatron-core itself writes; documents end with END, and have it nowhere else."""
    rng = np.random.default_rng(seed)
    builder = indexed.IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for size in sizes:
        tokens = [*rng.integers(8, 50_000, size), END]
        builder.add_item(torch.tensor(np.array(tokens, "i8")))
        builder.end_document()
    builder.finalize(f"{path}.idx")
    return fx.data.MegatronTokens(path=str(path))


def _megatron(blend, samples, length, split, part, seed):
    """The samples of Megatron-core."""
    tokenizer = SimpleNamespace(vocab_size=50_000, eod=END, pad=-1, unique_identifiers={"t": 1})
    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=length,
        blend=blend,
        split=split,
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=False,
    )
    sizes = [None, None, None]
    sizes[("train", "valid", "test").index(part)] = samples
    sizes = sizes if samples is None else [size or 0 for size in sizes]
    builder = blended.BlendedMegatronDatasetBuilder(gpt.GPTDataset, sizes, lambda: True, config)
    built = builder.build()
    return built[("train", "valid", "test").index(part)]


def _check(expected, source, order, length, seed):
    """Every row on ranks that are cut and resumed, against the sample of its number."""
    plan, rows, position = fx.Plan(seed=seed), [], None
    for ranks, batches in ((2, 3), (3, 1), (1, None)):
        loaders = [
            fx.tokens(
                source, ctx, plan, length=length, batch_size=2, documents=True, compatible=order
            )
            for ctx in world(ranks)
        ]
        if position is not None:
            loaders = [loader.at(position) for loader in loaders]
        for step in itertools.islice(zip(*loaders, strict=True), batches):
            for batch in step:
                columns = [batch.data[name][batch.valid] for name in ("tokens", "labels")]
                rows += zip(*columns, batch.data["positions"][batch.valid], strict=True)
            position = step[0].position
        if position.is_last:
            break
    assert len(rows) == (len(expected) if order.samples is None else order.samples)
    for (tokens, labels, positions), number in zip(rows, range(len(expected)), strict=False):
        sample = expected[number]
        assert torch.equal(tokens, sample["tokens"])
        assert torch.equal(positions, sample["position_ids"])
        masked = torch.where(sample["loss_mask"] > 0, sample["labels"], -100)
        assert torch.equal(labels, masked)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=10, max_size=40).filter(lambda s: sum(s) > 100),
    samples=st.one_of(st.none(), st.integers(1, 120)),
    length=st.integers(5, 24),
    split=st.sampled_from([(1.0,), (9.0, 1.0), (2.0, 1.0, 1.0)]),
    seed=st.integers(0, 9),
)
def test_a_source_has_the_samples_of_megatron(
    tmp_path_factory, sizes, samples, length, split, seed
):
    folder = tmp_path_factory.mktemp("megatron")
    source = _write(folder / "a", sizes, seed)
    text = ",".join(map(str, split))
    order = fx.data.MegatronOrder(samples=samples, split=split)
    expected = _megatron(([source.path], None), samples, length, text, "train", seed)
    _check(expected, source, order, length, seed)


@pytest.mark.parametrize("part", ["valid", "test"])
def test_other_parts_of_the_split(tmp_path, part):
    source = _write(tmp_path / "a", [20] * 40, 0)
    order = fx.data.MegatronOrder(samples=33, split=(8, 1, 1), part=part)
    expected = _megatron(([source.path], None), 33, 8, "8,1,1", part, 1234)
    _check(expected, source, order, 8, 1234)


@settings(max_examples=20, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.1, 0.3, 0.7, 1.0, 3.0]), min_size=2, max_size=4),
    samples=st.integers(20, 150),
    seed=st.integers(0, 9),
)
def test_a_blend_has_the_samples_of_megatron(tmp_path_factory, weights, samples, seed):
    folder = tmp_path_factory.mktemp("megatron")
    sources = [
        _write(folder / str(n), [9 + 5 * n] * (11 + n), seed + n) for n in range(len(weights))
    ]
    blend = fx.data.Blend(
        parts=[
            fx.data.BlendPart(name=str(n), source=source, weight=weight)
            for n, (source, weight) in enumerate(zip(sources, weights, strict=True))
        ]
    )
    order = fx.data.MegatronOrder(samples=samples)
    paths = [source.path for source in sources]
    expected = _megatron((paths, weights), samples, 16, "1", "train", seed)
    _check(expected, blend, order, 16, seed)
