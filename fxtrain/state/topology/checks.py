"""The rank of a process, as a launcher describes it in variables: read, completed, checked."""

import re
from collections.abc import Mapping

import attrs

from fxtrain._display import counted
from fxtrain.errors import ContextError

_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_|CROSS_)?(RANK|(WORLD_)?SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_RUN_ID$"
    r"|OMPI_COMM_WORLD_|MV2_COMM_WORLD_|PMI_(LOCAL_)?(RANK|SIZE)$|MPI_LOCAL|PALS_(LOCAL_)?RANKID"
    r"|PALS_LOCAL_SIZE|PJRT_|TPU_WORKER_|SLURM_(PROCID|LOCALID|NODEID|N?TASKS|NNODES)"
    r"|SLURM_STEP_(ID|NUM|TASKS|NODELIST)"
)
_SHOWN_CHARS = 60


@attrs.frozen(kw_only=True)
class Topology:
    """The rank of this process, and the address to which ranks connect, by a launcher.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Number of ranks.
        local_rank: Number of this rank on its node.
        local_world_size: Ranks on this node.
        node_rank: Number of this node.
        num_nodes: Number of nodes.
        launcher: torchrun, slurm, openmpi, mpich, pjrt, plain or none.
        main_address: Host name or address of the node of rank 0.
        main_port: TCP port there; 0 at one rank.
        store_is_served: Whether the launcher already serves the store at that port, so that
            rank 0 connects to it like the others.
        attempt: Number of the restart under an elastic launcher; each uses separate keys.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"
    main_address: str = "127.0.0.1"
    main_port: int = 0
    store_is_served: bool = False
    attempt: int = 0


def read_number(
    env: Mapping[str, str],
    *names: str,
    least: int = 0,
    most: int = 10**9,
    default: int | None = None,
) -> int:
    """The first of these variables that is set, as a whole number in a range.

    Raises:
        ContextError: none is set and there is no default, or the value is invalid.
    """
    name = next((name for name in names if name in env), None)
    if name is None:
        if default is None:
            raise ContextError(
                f"{' or '.join(names)} is not set, but {_found(env)}. Set it for every process, "
                f"or unset the others to run alone.",
                code="FX101",
            )
        return default
    text = env[name]
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) or not least <= int(text) <= most:
        raise ContextError(
            f"{name}={_short(text)!r}: expected a whole number from {least} to {most}. Set "
            f"it for every process, or unset it and the others of its launcher to run alone.",
            code="FX101",
        )
    return int(text)


def with_node_numbers(topology: Topology) -> Topology:
    """Number the nodes, if a launcher only tells the ranks on this one.

    Exact if ranks fill one node after the other and all nodes have equally many.
    """
    before = topology.rank - topology.local_rank
    node_rank = -(-before // topology.local_world_size)
    rest = topology.world_size - before
    num_nodes = node_rank + -(-rest // topology.local_world_size)
    return attrs.evolve(topology, node_rank=max(0, node_rank), num_nodes=max(1, num_nodes))


def checked_topology(topology: Topology, env: Mapping[str, str]) -> Topology:
    """Check a launcher's topology, and add the address to which its ranks connect.

    MASTER_ADDR and MASTER_PORT override the topology's; an empty address or port 0 in it means
    unknown.

    Raises:
        ContextError: the numbers contradict each other, or the address is missing.
    """
    if problems := _contradictions(topology, env):
        raise ContextError(
            f"The variables of {topology.launcher} contradict each other: {'; '.join(problems)}. "
            f"Found {_found(env)}. Start every rank with the same launcher, or unset the "
            f"variables of other launchers.",
            code="FX101",
        )
    here = "127.0.0.1" if topology.num_nodes == 1 else ""
    address = env.get("MASTER_ADDR", "").strip() or topology.main_address or here
    alone = topology.world_size == 1
    port = read_number(
        env, "MASTER_PORT", least=0 if alone else 1, most=65_535, default=topology.main_port
    )
    known = {"MASTER_ADDR": bool(address), "MASTER_PORT": bool(port)}
    if not alone and not all(known.values()):
        missing = " and ".join(name for name, known_value in known.items() if not known_value)
        raise ContextError(
            f"{topology.launcher}: {topology.world_size} ranks need {missing} to connect. Found "
            f"{_found(env)}. Set the host name of rank 0 and a free port on it for every rank, "
            f"or use torchrun or `fxtrain launch`.",
            code="FX101",
        )
    return attrs.evolve(topology, main_address=address or "127.0.0.1", main_port=port)


def _contradictions(t: Topology, env: Mapping[str, str]) -> list[str]:
    tests = (
        (t.rank >= t.world_size, f"rank {t.rank} of {t.world_size}"),
        (t.local_rank >= t.local_world_size, f"local rank {t.local_rank} of {t.local_world_size}"),
        (t.node_rank >= t.num_nodes, f"node {t.node_rank} of {t.num_nodes}"),
        # On any node, ranks increase with local ranks, so this many ranks must be before and after.
        (
            not t.local_rank <= t.rank <= t.world_size - t.local_world_size + t.local_rank,
            f"{t.local_world_size} ranks on this node are impossible with local rank "
            f"{t.local_rank} at rank {t.rank} of {t.world_size}{_why(t, env)}",
        ),
        (
            t.launcher == "torchrun" and (t.node_rank == 0) != (t.rank == t.local_rank),
            f"rank {t.rank} with local rank {t.local_rank} on node {t.node_rank}",
        ),
    )
    problems = [text for wrong, text in tests if wrong]
    if t.launcher not in ("torchrun", "plain"):
        other = read_number(env, "WORLD_SIZE", least=1, default=t.world_size)
        if other != t.world_size:
            problems.append(
                f"WORLD_SIZE={other}, but {t.launcher} started {counted(t.world_size, 'rank')}"
            )
    return problems


def _why(t: Topology, env: Mapping[str, str]) -> str:
    if t.launcher == "torchrun" and t.local_rank == 0:
        return " (torchrun --virtual-local-rank hides the local rank: omit it)"
    if t.launcher == "plain" and "LOCAL_WORLD_SIZE" not in env:
        return " (LOCAL_WORLD_SIZE is not set, so all ranks are assumed to be on one node)"
    return ""


def _found(env: Mapping[str, str]) -> str:
    shown = [f"{name}={_short(env[name])}" for name in sorted(env) if _RANK_VARIABLES.match(name)]
    return ", ".join(shown) or "nothing else"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
