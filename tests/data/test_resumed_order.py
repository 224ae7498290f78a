"""A position inside an epoch continues the order that it was made in, or is refused."""

import itertools
import json
import random

import attrs
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset

import fxtrain as fx
from tests._errors import raises_code
from tests.data._loaders import world
from tests.data._streams import Numbers
from tests.data._token_files import write_megatron, write_nanogpt

N = 24
DOCUMENTS = [[*range(size)] for size in (5, 9, 2, 7, 3, 8, 6, 4)]


class _Own(Sampler):
    def __init__(self, units):
        self.units = units

    def __iter__(self):
        return iter(self.units)


def _loader(dataset, seed=0, **more):
    batching = {} if "batch_sampler" in more else {"batch_size": 2}
    return lambda _: fx.shard(
        DataLoader(dataset, **(batching | more)), world(1)[0], fx.Plan(seed=seed)
    )


def _tokens(changed=(), documents=DOCUMENTS, write=write_megatron, seed=0, **settings):
    def make(folder):
        source = write(folder, documents)
        for name, place in changed:
            data = bytearray((folder / name).read_bytes())
            data[place] ^= 1
            (folder / name).write_bytes(data)
        plan, ctx = fx.Plan(seed=seed), world(1)[0]
        return fx.tokens(source, ctx, plan, **{"length": 4, "batch_size": 2, **settings})

    return make


class _Later(Numbers):
    """1 to n."""

    def __iter__(self):
        return iter(range(1, self.n + 1))


class _Chunks(Dataset):
    """A dataset of which nothing but its length is known."""

    def __len__(self):
        return N

    def __getitem__(self, row):
        return row


ROWS = list(range(N))
PACKED = fx.data.BestFit(window_rows=2, shuffle_windows=2)
SAME = {
    "in order": _loader(ROWS),
    "a dataset": _loader(_Chunks(), shuffle=True),
    "a sampler": _loader(ROWS, sampler=_Own(ROWS[::-1])),
    "batches": _loader(ROWS, batch_sampler=_Own([[0, 1], [2], [3, 4, 5], [6], [7]])),
    "names": _loader({name: 1 for name in "abcdef"}, sampler=_Own(list("cabfde"))),
    "a subset": _loader(Subset(ROWS, range(0, N, 2)), shuffle=True),
    "two": _loader(ConcatDataset([Subset(ROWS, range(6)), ROWS]), shuffle=True),
    "a stream": _loader(Numbers(N)),
    "tokens": _tokens(),
    "packed": _tokens(packing=PACKED),
    "megatron": _tokens(compatible="megatron", seed=3),
}
OTHERS = {
    "in order": [_loader(ROWS, shuffle=True), _loader(ROWS[:-1])],
    "a dataset": [_loader(_Chunks(), seed=1, shuffle=True)],
    "a sampler": [_loader(ROWS, sampler=_Own([*ROWS[::-1][:-2], 0, 1]))],
    "batches": [_loader(ROWS, batch_sampler=_Own([[0, 1], [2, 3], [4, 5], [6], [7]]))],
    "names": [_loader({name: 1 for name in "abcdef"}, sampler=_Own(list("cabfed")))],
    "a subset": [_loader(Subset(ROWS, range(1, N, 2)), shuffle=True)],
    "two": [_loader(ConcatDataset([Subset(ROWS, range(1, 7)), ROWS]), shuffle=True)],
    "a stream": [_loader(_Later(N)), _loader(ROWS)],
    "tokens": [
        _tokens(shuffle=False),
        _tokens(seed=1),
        _tokens(changed=[("a.bin", 0)]),
        _tokens(changed=[("a.bin", -1)]),
        _tokens(packing=PACKED),
        _tokens(write=write_nanogpt),
    ],
    "packed": [
        _tokens(packing=attrs.evolve(PACKED, window_rows=4)),
        _tokens(packing=attrs.evolve(PACKED, shuffle_windows=1)),
        _tokens(),
        _tokens(documents=DOCUMENTS[::-1], packing=PACKED),
    ],
    "megatron": [
        _tokens(compatible="megatron", seed=4),
        _tokens(compatible=fx.data.MegatronOrder(samples=9), seed=3),
        _tokens(seed=3),
    ],
}


def _rows(batches):
    found = []
    for batch in batches:
        data = batch.data["tokens"] if isinstance(batch.data, dict) else batch.data
        found.append(data.tolist())
    return found


def _cut(folder, make, batches=2):
    """A position inside the first epoch, and the batches that follow it."""
    (folder / "first").mkdir()
    loader = make(folder / "first")
    position = list(itertools.islice(loader, batches))[-1].position
    assert not position.is_last
    # As a checkpoint keeps it.
    position = fx.Position(**json.loads(json.dumps(attrs.asdict(position))))
    return position, _rows(loader.at(position))


@pytest.mark.parametrize("name", SAME)
def test_the_same_data_continue(tmp_path, name):
    position, rest = _cut(tmp_path, SAME[name])
    again = SAME[name](tmp_path / "first").at(position)
    random.seed(1)
    assert _rows(again) == rest


@pytest.mark.parametrize(
    ("name", "other"), [(name, at) for name in OTHERS for at in range(len(OTHERS[name]))]
)
def test_other_data_are_refused(tmp_path, name, other):
    position, rest = _cut(tmp_path, SAME[name])
    (tmp_path / "other").mkdir()
    loader = OTHERS[name][other](tmp_path / "other")
    with raises_code("FX401") as caught:
        list(loader.at(position))
    assert caught.value.code == "FX401"
    # The next epoch may have other data.
    assert _rows(loader.at(attrs.evolve(position, epoch=1, index=0)))
    assert rest


def test_tokens_that_moved_or_were_touched_continue(tmp_path):
    position, rest = _cut(tmp_path, SAME["tokens"])
    moved = (tmp_path / "first").rename(tmp_path / "moved")
    for file in moved.iterdir():
        file.touch()
    ctx, plan = world(1)[0], fx.Plan()
    source = fx.data.MegatronTokens(path=str(moved / "a"))
    loader = fx.tokens(source, ctx, plan, length=4, batch_size=2)
    assert _rows(loader.at(position)) == rest


def _blend(folder, *names, weight=1.0, **settings):
    parts = []
    for name in names:
        tokens = np.arange(80) + 100 * ord(name[0])
        tokens.astype("<u2").tofile(folder / f"{name}.bin")
        source = fx.data.NanoGPTTokens(path=str(folder / f"{name}.bin"), end=1)
        part = f"other {name}" if parts else "web"
        parts.append(fx.data.BlendPart(name=part, source=source, weight=weight))
    settings = {"length": 5, "batch_size": 2, **settings}
    return fx.tokens(fx.data.Blend(parts=parts), world(1)[0], fx.Plan(), **settings)


def test_a_source_of_a_blend_is_known_by_its_files(tmp_path):
    loader = _blend(tmp_path, "a", "b")
    position = next(iter(loader)).position
    state = loader.state()
    # Other weights and another source beside it are part of what a blend can do.
    assert next(iter(_blend(tmp_path, "a", "c", weight=2.0).at(position, state)))
    for wrong in (
        _blend(tmp_path, "d", "b"),
        _blend(tmp_path, "a", "b", packing=fx.data.BestFit(window_rows=2)),
    ):
        with raises_code("FX401", '"web"') as caught:
            next(iter(wrong.at(position, state)))
        assert caught.value.code == "FX401"


def test_a_position_of_ones_own_has_no_order():
    loader = _loader(ROWS, shuffle=True)(None)
    here = list(itertools.islice(loader, 3))[-1].position
    own = fx.Position(index=here.index)
    assert here.order and not own.order
    assert _rows(loader.at(own)) == _rows(loader.at(here))
    assert here == attrs.evolve(here, order="")
    assert torch.equal(next(iter(loader.at(own))).data, next(iter(loader.at(here))).data)
