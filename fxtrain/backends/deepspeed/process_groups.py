"""The ranks of a context, in the form that DeepSpeed expects."""

from datetime import timedelta
from types import ModuleType
from typing import Any

import attrs
from torch import distributed as dist

from fxtrain.ops.transport.member_groups import open_by_members
from fxtrain.state import DistContext


@attrs.frozen(eq=False)
class SequenceGroups:
    """What DeepSpeed calls an mpu, if sequences are split over the mesh's `context` axis.

    Without one, DeepSpeed 0.19 reduces gradients over the data ranks only, and the ranks of one
    sequence diverge.
    """

    ctx: DistContext
    both: Any  # the group of all ranks, over which gradients are reduced and ZeRO shards
    alone: Any  # a group of this rank

    def get_data_parallel_group(self) -> Any:
        # The ranks over which overflow is checked, and whose first rank saves.
        return self.both

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(range(self.ctx.world_size))

    def get_data_parallel_world_size(self) -> int:
        return self.ctx.axis("data").world_size

    def get_data_parallel_rank(self) -> int:
        return self.ctx.rank

    def get_sequence_parallel_group(self) -> Any:
        return self.ctx.axis("context").comm.group

    def get_sequence_parallel_world_size(self) -> int:
        return self.ctx.axis("context").world_size

    def get_sequence_parallel_rank(self) -> int:
        return self.ctx.axis("context").rank

    def get_sequence_data_parallel_group(self) -> Any:
        return self.both

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.ctx.world_size

    def get_sequence_data_parallel_rank(self) -> int:
        return self.ctx.rank

    def get_model_parallel_group(self) -> Any:
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


def sequence_groups(library: ModuleType, ctx: DistContext) -> SequenceGroups | None:
    """The groups of a context that splits sequences; None if it does not.

    Effects:
        Opens a group of this rank alone.
    """
    if ctx.axis("context").world_size == 1:
        return None
    alone = open_by_members([ctx.rank], timeout=timedelta(seconds=ctx.comm.timeout_s))
    return SequenceGroups(ctx, library.utils.groups._clone_world_group(), alone)


def release_groups(library: ModuleType, ctx: DistContext) -> None:
    """Remove from DeepSpeed the groups that engines of another plan, mesh or context left there.

    It keeps one set per process and never replaces them: a later engine would use old ones.
    """
    groups = library.utils.groups
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # engines keep their own
    if isinstance(groups.mpu, SequenceGroups) and groups.mpu.ctx is not ctx:
        groups.mpu = None
    ranks = dist.distributed_c10d._world.pg_group_ranks
    if tuple(ranks.get(groups._TENSOR_MODEL_PARALLEL_GROUP, ())) == ctx.axis("tensor").comm.ranks:
        return
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None
    if groups.mpu is groups:
        groups.mpu = None
