"""What data order, exchanges, meshes and manifests cost at 100,000 ranks and 10^13 rows, counted.

docs/concepts/performance.md says which grow with the ranks, and why.
"""

import cProfile
from itertools import pairwise

import attrs
import torch
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx
from fxtrain.checkpoint.folders import read_manifest
from fxtrain.checkpoint.manifest import dump_manifest
from fxtrain.checkpoint.storage import open_storage
from fxtrain.testing import fake_world

MANY, ROWS, BATCH = 100_000, 10**13, 4


class _Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


def _calls(run):
    """Calls of Python and C functions: exact, and the same on a busy machine."""
    counter = cProfile.Profile(subcalls=False)
    with counter:
        run()
    return sum(entry.callcount for entry in counter.getstats())


def _batches(ranks, index):
    """Calls for the first two batches of the last rank, from an index of a later epoch on."""
    with fake_world(ranks, rank=ranks - 1) as ctx:
        loader = fx.shard(DataLoader(_Rows(), batch_size=BATCH, shuffle=True), ctx, fx.Plan(seed=1))
        position = fx.Position(epoch=3, index=index, samples=3 * ROWS + index, updates=1)
        batches = iter(loader.at(position))
        first = _calls(lambda: next(batches))
        return first, [_calls(lambda: next(batches)) for _ in range(2)]


def test_a_batch_costs_as_much_on_100_000_ranks_and_anywhere_in_an_epoch():
    few, many = 8, MANY
    _batches(few, 0)  # imports and caches
    start, stride = _batches(few, 0), many * BATCH
    late = _batches(few, ROWS - ROWS % stride - stride * 10)
    assert late[1] == start[1]
    assert late[0] <= 1.2 * start[0]
    first, later = _batches(many, ROWS - ROWS % stride - stride * 10)
    assert later == start[1]
    # The ranks compare how they load the data, once: in 17 rounds of messages.
    assert first - start[0] <= 60 * 17


def test_an_exchange_costs_the_logarithm_of_the_number_of_ranks():
    def calls(ranks, call):
        with fake_world(ranks) as ctx:
            call(ctx)
            return _calls(lambda: call(ctx))

    for call in (fx.ops.barrier, lambda ctx: fx.ops.agree(7, ctx)):
        counts = [calls(ranks, call) for ranks in (2**10, 2**13, 2**16)]
        assert counts[2] - counts[1] == counts[1] - counts[0] <= 3 * 60


def test_a_mesh_names_every_group_on_every_rank():
    """torch wants that of all ranks: calls grow with them, and no faster."""

    def connect(ranks):
        def run():
            with fake_world(ranks, mesh=fx.Mesh(replicate=-1, shard=8)):
                pass

        return _calls(run)

    connect(8)
    counts = [connect(ranks) for ranks in (400, 800, 1600)]
    slopes = [(more - less) / (400 * 2**n) for n, (less, more) in enumerate(pairwise(counts))]
    assert slopes[1] <= 1.1 * slopes[0] <= 70, (counts, slopes)


def _manifest(folder, ranks):
    """A manifest as so many ranks would have written it, from that of one."""
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, optimizer=lambda p: torch.optim.AdamW(p))
        path = fx.save(folder, ctx, model).path
    manifest = read_manifest(open_storage(path))
    ((name, file),) = manifest.files.items()

    def renamed(entry, rank):
        parts = [
            attrs.evolve(part, file=name.replace("00000", f"{rank:05d}")) for part in entry.parts
        ]
        return attrs.evolve(entry, parts=type(entry.parts)(parts))

    own = [
        {key: renamed(entry, rank) for key, entry in manifest.own[0].items()}
        for rank in range(ranks)
    ]
    files = {name.replace("00000", f"{rank:05d}"): file for rank in range(ranks)}
    return attrs.evolve(manifest, own=type(manifest.own)(own), files=files)


def test_a_manifest_grows_by_less_than_two_kilobytes_for_each_rank(tmp_path):
    manifests = [_manifest(tmp_path / str(ranks), ranks) for ranks in (100, 200, 400)]
    texts = [dump_manifest(manifest) for manifest in manifests]
    sizes = [len(text) for text in texts]
    per_rank = [(sizes[1] - sizes[0]) / 100, (sizes[2] - sizes[1]) / 200]
    assert per_rank[1] <= 1.01 * per_rank[0] <= 2000, per_rank
