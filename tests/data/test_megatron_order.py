"""Rows in the order of Megatron, and what it does not have; tests/megatron compares the rows."""

import pytest

import fxtrain as fx
from tests.data._loaders import world
from tests.data._token_files import write_megatron, write_nanogpt


@pytest.fixture
def source(tmp_path):
    return write_megatron(tmp_path, [[*range(size)] for size in (5, 9, 2, 7)])


def _rows(source, **settings):
    (ctx,) = world(1)
    settings = {"length": 4, "batch_size": 2, **settings}
    loader = fx.tokens(source, ctx, fx.Plan(seed=1), **settings)
    return [row for batch in loader for row in batch.data["tokens"][batch.valid].tolist()]


def test_an_epoch_has_every_whole_row_once(source):
    assert len(_rows(source, compatible="megatron", shuffle=False)) == (23 - 1) // 4
    assert _rows(source, compatible=fx.data.MegatronOrder()) == _rows(source, compatible="megatron")


def test_rows_end_with_the_samples_of_the_run(source):
    many = _rows(source, compatible=fx.data.MegatronOrder(samples=40))
    assert len(many) == 40
    # Epochs are shuffled together, so that fewer samples are not the first of more.
    assert many[:5] != _rows(source, compatible=fx.data.MegatronOrder(samples=5))


def test_what_megatron_does_not_have_is_refused(source, tmp_path):
    part = fx.data.BlendPart(name="a", source=source)
    growing = fx.data.BlendPart(name="b", source=source, weight=((0, 1.0), (9, 2.0)))
    order = fx.data.MegatronOrder(samples=9)
    other = write_nanogpt(tmp_path, [[1, 2, 3]], name="other")
    for wrong, settings, message in (
        (other, {}, "that of its own files"),
        (source, {"packing": fx.data.BestFit()}, "no best-fit packing"),
        (source, {"length": 30}, "fewer than a row of 30"),
        (fx.data.Blend(parts=[part]), {"compatible": "megatron"}, "a number of samples"),
        (fx.data.Blend(parts=[part, growing]), {}, "constant weights above 0"),
    ):
        with pytest.raises(fx.errors.DataError, match=message):
            _rows(wrong, **{"compatible": order, **settings})
    empty = fx.data.MegatronOrder(split=(1.0, 0.0), part="valid")
    with pytest.raises(fx.errors.DataError, match=r"the valid part of .* has 0 sequences"):
        _rows(source, compatible=empty)
    for split in ((), (1.0,) * 4, (-1.0, 2.0), (0.0, 0.0)):
        with pytest.raises(fx.PlanError, match="one to three weights"):
            fx.data.MegatronOrder(split=split)
