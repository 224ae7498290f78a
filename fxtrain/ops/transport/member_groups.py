"""Process groups that only their members open."""

from typing import Any

from torch import distributed as dist

_MANY = 1000  # more than a process has groups open


def open_by_members(ranks: list[int], **options: Any) -> Any:
    """Open a process group without the ranks that are not in it.

    torch names such a group after its ranks and the number of open groups. Once other groups have
    been closed, that may be the name of an earlier group of the same ranks: of one that is open,
    which torch refuses, or of a closed one, whose addresses are still in the store. Here the
    number counts the groups of these ranks that this rank has opened, so that no name comes twice.

    Args:
        ranks: The members, of which this rank is one. They open the same groups in the same order.
        options: Further arguments of `torch.distributed.new_group`.

    Returns:
        The group.
    """
    # torch_xla replaces torch.distributed.new_group with one that takes fewer arguments.
    library: Any = dist.distributed_c10d
    names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # pyright: ignore
    simulated = dist.get_backend() == "fake"  # its store does not count
    key = f"fxtrain/groups/{'_'.join(map(str, ranks))}/{library.group.WORLD.rank()}"
    number = _MANY + (0 if simulated else library._get_default_store().add(key, 1))
    placeholders: list[object] = []
    try:
        while True:
            placeholders += [object() for _ in range(number - len(names))]
            names.update(dict.fromkeys(placeholders, ""))
            try:
                return library.new_group(ranks, use_local_synchronization=True, **options)
            except ValueError as error:
                if not simulated or "group name" not in str(error):
                    raise
                number += 1
    finally:
        for placeholder in placeholders:
            del names[placeholder]
