"""Process groups that only their members open."""

from typing import Any

from torch import distributed as dist

__all__ = ["open_by_members"]


def open_by_members(ranks: list[int], **options: Any) -> Any:
    """Open a process group without the ranks that are not in it.

    torch names such a group after its ranks and the number of open groups, and refuses a name
    that is in use: that of an earlier group of the same ranks, if others have been closed since.
    Placeholders in torch's table raise the number until the name is new. They are the same on all
    members, which have opened and closed the same groups.

    Args:
        ranks: The members, of which this rank is one.
        options: Further arguments of `torch.distributed.new_group`.

    Returns:
        The group.
    """
    # torch_xla replaces torch.distributed.new_group with one that takes fewer arguments.
    new_group = dist.distributed_c10d.new_group
    names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # pyright: ignore
    placeholders: list[object] = []
    try:
        while True:
            try:
                return new_group(ranks, use_local_synchronization=True, **options)
            except ValueError as error:
                if "group name" not in str(error):
                    raise
                placeholders.append(object())
                names[placeholders[-1]] = ""
    finally:
        for placeholder in placeholders:
            del names[placeholder]
