"""Collectives as torch's dispatcher sees them, from Python and C++."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

from fxtrain.state import Traffic

# torch's operators by kind: those of c10d, and the functional ones (_c10d_functional). The latter
# call the former below a dispatch mode, so none is counted twice.
_KINDS = {
    "all_gather": (
        "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
        "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced",
    ),
    "all_reduce": (
        "allreduce_ allreduce_coalesced_",
        "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
    ),
    "all_to_all": ("alltoall_ alltoall_base_", "all_to_all_single"),
    "barrier": ("barrier monitored_barrier_", ""),
    "broadcast": ("broadcast_", "broadcast broadcast_"),
    "gather": ("gather_", ""),
    "recv": ("recv_ recv_any_source_", "irecv"),
    "reduce": ("reduce_", ""),
    "reduce_scatter": (
        "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
    ),
    "scatter": ("scatter_", ""),
    "send": ("send", "isend"),
}
_OPERATORS = {
    f"{space}::{name}": kind
    for kind, operators in _KINDS.items()
    for space, names in zip(("c10d", "_c10d_functional"), operators, strict=True)
    for name in names.split()
} | {"_dtensor::shard_dim_alltoall": "all_to_all"}
# c10d operators of these kinds take their output first.
_OUTPUT_FIRST = ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter")
_BATCH = "_c10d_functional::batch_p2p_ops"
_P2P_KINDS = {"isend": "send", "irecv": "recv"}


@attrs.frozen
class Collective:
    """One call of a collective.

    Attributes:
        kind: As in `Traffic`.
        ranks: Global ranks that take part.
        label: torch's description of their group, such as "mesh_shard"; often generic.
        bytes: As in `Traffic`.
    """

    kind: str
    ranks: tuple[int, ...]
    label: str
    bytes: int


def sent(operator: str, args: tuple[Any, ...]) -> list[tuple[str, int]]:
    """Kind and bytes of each collective that an operator performs; empty for most."""
    if operator == _BATCH:
        return [
            (_P2P_KINDS[way], _bytes(tensor)) for way, tensor in zip(args[0], args[3], strict=True)
        ]
    if operator not in _OPERATORS:
        return []
    kind = _OPERATORS[operator]
    given = args[operator.startswith("c10d::") and kind in _OUTPUT_FIRST]
    return [(kind, 0 if kind == "barrier" else _bytes(given))]


def collectives(func: Any, args: tuple[Any, ...]) -> list[Collective]:
    """The collectives that an operator performs, each with its group."""
    return [
        Collective(kind, *_group(func, args), size) for kind, size in sent(func._schema.name, args)
    ]


def summary(
    calls: Iterable[Collective], axis_of: Callable[[Collective], str]
) -> tuple[Traffic, ...]:
    """Calls summed by kind and axis, most bytes first."""
    counts: Counter[tuple[str, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int]] = Counter()
    for call in calls:
        key = (call.kind, axis_of(call), len(call.ranks))
        counts[key] += 1
        sizes[key] += call.bytes
    rows = [
        Traffic(kind=kind, axis=axis, ranks=ranks, count=count, bytes=sizes[kind, axis, ranks])
        for (kind, axis, ranks), count in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.axis)))


def _group(func: Any, args: tuple[Any, ...]) -> tuple[tuple[int, ...], str]:
    """Ranks and label of the process group among an operator's arguments."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args)}  # noqa: B905
    if "process_group" in named:
        group = dist.ProcessGroup.unbox(named["process_group"])
    else:
        group = dist.distributed_c10d._resolve_process_group(named["group_name"])
    return tuple(dist.get_process_group_ranks(group)), group.group_desc


def _bytes(value: Any) -> int:
    leaves = tree_leaves(value)
    # The parts that a simulated rank scatters are one tensor, many times.
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    sizes = {key: leaf.numel() * leaf.element_size() for key, leaf in tensors.items()}
    return sum(sizes.get(id(leaf), 0) for leaf in leaves)
