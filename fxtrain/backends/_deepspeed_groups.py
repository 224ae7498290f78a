"""The ranks of a context in the words in which DeepSpeed asks for them."""

from types import ModuleType
from typing import Any

import attrs
from torch import distributed as dist

from fxtrain.state import DistContext

__all__ = ["SequenceGroups", "sequence_groups", "use_groups"]


@attrs.frozen(eq=False)
class SequenceGroups:
    """What DeepSpeed calls an mpu, where sequences are cut over the mesh's `context` axis.

    Without one, DeepSpeed 0.19 reduces gradients over the data ranks only, and the ranks of one
    sequence drift apart.
    """

    ctx: DistContext
    both: Any  # the group of all ranks, over which gradients are reduced and ZeRO spreads
    alone: Any  # a group of this rank

    def get_data_parallel_group(self) -> Any:
        # Over which checks of overflow go, and whose first rank saves.
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
    """The groups of a context that cuts sequences; None where it does not.

    Effects:
        Opens a group of this rank alone.
    """
    if ctx.axis("context").world_size == 1:
        return None
    alone = dist.new_group([ctx.rank], use_local_synchronization=True)
    return SequenceGroups(ctx, library.utils.groups._clone_world_group(), alone)


def use_groups(library: ModuleType, made: SequenceGroups | None) -> None:
    """Make these the groups that DeepSpeed keeps per process, in place of an earlier engine's."""
    groups = library.utils.groups
    if made is not None or isinstance(groups.mpu, SequenceGroups):
        groups.mpu = made
