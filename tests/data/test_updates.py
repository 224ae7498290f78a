"""`loader.updates`: batches until an update of the run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fxtrain as fx
from tests._errors import raises_code

CTX = fx.DistContext()


def _loader(rows=7, *, accumulate=1, flush=True, **how):
    plan = fx.Plan(accumulate=accumulate, flush=flush, seed=3)
    options = {"batch_size": 2, "shuffle": True, **how}
    return fx.shard(DataLoader(torch.arange(rows), **options), CTX, plan)


@settings(deadline=None)  # its first example loads modules
@given(
    rows=st.integers(1, 7),
    accumulate=st.integers(1, 3),
    flush=st.booleans(),
    n=st.integers(0, 12),
    epochs=st.none() | st.integers(0, 4),
    cuts=st.lists(st.integers(1, 6), max_size=4),
)
def test_they_are_the_batches_of_the_epochs_in_any_number_of_parts(
    rows, accumulate, flush, n, epochs, cuts
):
    loader = _loader(rows, accumulate=accumulate, flush=flush)
    wanted = []
    for batch in (b for e in loader.epochs(99 if epochs is None else epochs) for b in e):
        if batch.position.micro == 0 and batch.position.updates > n:
            break
        wanted.append((batch.data.tolist(), batch.position))
    while wanted and n and epochs is None and wanted[-1][1].micro:
        wanted.pop()  # batches of a window that is never closed
    if n == 0:
        wanted = []
    found = []
    for cut in [*cuts, None]:
        for batch in loader.updates(n, epochs=epochs):
            found.append((batch.data.tolist(), batch.position))
            if cut is not None and (cut := cut - 1) == 0:
                break
        loader = loader if not found else loader.at(found[-1][1])
    ends = [i for i, (_, at) in enumerate(wanted) if at.updates == n and not at.micro]
    assert found == wanted[: ends[0] + 1 if ends else None]
    assert list(loader.updates(n, epochs=epochs)) == []


def test_the_loader_has_its_batch():
    loader = _loader()
    for data in loader.updates(2):
        assert loader.batch.data.tolist() == data.data.tolist()
    assert loader.batch.position.updates == 2


@pytest.mark.parametrize("call", [lambda one: one.updates(-1), lambda one: one.updates("3")])
def test_a_wrong_number_is_named(call):
    with raises_code("FX400", "updates("):
        call(_loader())
    with raises_code("FX400", "epochs=1.5"):
        _loader().updates(3, epochs=1.5)


def test_epochs_without_a_batch_never_get_there():
    with raises_code("FX400", "Epoch 0"):
        list(_loader(1, drop_last=True).updates(3))


def test_an_epoch_without_a_batch_is_said(caplog):
    assert [list(epoch) for epoch in _loader(1, drop_last=True).epochs(2)] == [[], []]
    assert [record.getMessage()[:21] for record in caplog.records] == ["Epoch 0 has no batch."]
