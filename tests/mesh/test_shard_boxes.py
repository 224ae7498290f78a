"""Which part of a tensor a rank holds, against torch's own arithmetic."""

import itertools

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from fxtrain.ops.splitting import shard_box

LAYOUTS = {
    "replicas": (Replicate(), Replicate()),
    "rows": (Replicate(), Shard(0)),
    "rows and columns": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
    "rows of other ranks' rows": (_StridedShard(0, split_factor=3), Shard(0)),
}


STRIDED = "rows of other ranks' rows"
# torch has no single box for strided shards of unequal lengths.
CASES = [(name, (12, 6)) for name in LAYOUTS] + [
    (name, shape) for name in LAYOUTS if name != STRIDED for shape in ((7, 5), (2, 1))
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_a_part_is_where_torch_has_it(name, shape):
    sizes, placements = (2, 3), LAYOUTS[name]
    for place in itertools.product(*map(range, sizes)):
        wanted, start = _compute_local_shape_and_global_offset(
            shape, sizes, list(place), placements
        )
        box = shard_box(shape, sizes, place, placements)
        assert box[1] == tuple(wanted)
        if 0 not in wanted:
            assert box[0] == tuple(start)
