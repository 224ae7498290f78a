"""The rank of a process, from the variables of torchrun or of its launcher."""

import re
from collections.abc import Mapping

import attrs

from fxtrain import _extensions
from fxtrain._display import counted
from fxtrain.errors import ContextError

_Env = Mapping[str, str]

_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_|CROSS_)?(RANK|(WORLD_)?SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_RUN_ID$"
    r"|OMPI_COMM_WORLD_|MV2_COMM_WORLD_|PMI_(LOCAL_)?(RANK|SIZE)$|MPI_LOCAL|PALS_(LOCAL_)?RANKID"
    r"|PALS_LOCAL_SIZE|PJRT_|TPU_WORKER_|SLURM_(PROCID|LOCALID|NODEID|N?TASKS|NNODES)"
    r"|SLURM_STEP_(ID|NUM|TASKS|NODELIST)"
)
_SHOWN_CHARS = 60
# How the variables of schedulers begin, which `_extensions.job_topology` reads.
_SCHEDULERS = ("MV2_", "OMPI_", "PALS_", "PJRT_", "PMI_", "SLURM_")


@attrs.frozen(kw_only=True)
class Topology:
    """The rank of this process, and the address to which ranks connect, by a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"  # torchrun, slurm, openmpi, mpich, pjrt, plain or none
    main_address: str = "127.0.0.1"  # of the node of rank 0
    main_port: int = 0  # a TCP port there; 0 at one rank
    # Whether the launcher serves the store at that port, so that rank 0 connects like the others.
    store_is_served: bool = False
    attempt: int = 0  # restarts under an elastic launcher, each of which uses separate keys


def read_number(
    env: Mapping[str, str],
    *names: str,
    least: int = 0,
    most: int = 10**9,
    default: int | None = None,
) -> int:
    """The first of these variables that is set, as a whole number in a range, or the default."""
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
    """Number the nodes, if a launcher only gives the ranks on this one.

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


def read_topology(env: Mapping[str, str]) -> Topology:
    """Find this rank in the variables that a launcher has set.

    The first of these that is present is used:

    1. RANK and WORLD_SIZE, from torchrun or set by hand, since torchrun often runs inside a
       scheduler. Without LOCAL_RANK, every rank is assumed to have its own node.
    2. Open MPI's, MPICH's, Intel MPI's, MVAPICH's and PALS's variables, unless they only
       repeat SLURM's.
    3. SLURM's, in a process that srun started.
    4. PJRT's, for the hosts and processes of a TPU.

    MASTER_ADDR and MASTER_PORT override values derived from a scheduler. To run alone inside
    one, set RANK=0 and WORLD_SIZE=1. Variables that are missing, contradict each other, or are no
    numbers in range are a ContextError with their names.

    Example:
        >>> from fxtrain.state.topology import read_topology
        >>> read_topology({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        ...                "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        ...                "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}).launcher
        'openmpi'
    """
    scheduled = "RANK" not in env and any(name.startswith(_SCHEDULERS) for name in env)
    topology = _extensions.job_topology(env) if scheduled else None
    # Job scripts often set WORLD_SIZE for srun's processes, so it counts last.
    if topology is None and ("RANK" in env or "WORLD_SIZE" in env):
        topology = _torch_like(env)
    return Topology() if topology is None else checked_topology(topology, env)


def _torch_like(env: _Env) -> Topology:
    """torchrun's variables; DeepSpeed's launcher and Ray name some of them differently."""
    elastic = "TORCHELASTIC_RUN_ID" in env
    rank, world_size = read_number(env, "RANK"), read_number(env, "WORLD_SIZE", least=1)
    one_node = world_size if elastic or "LOCAL_RANK" in env else 1
    local_world = read_number(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", least=1, default=one_node)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=read_number(env, "LOCAL_RANK", default=rank % local_world),
        local_world_size=local_world,
        launcher="torchrun" if elastic else "plain",
        main_address="",
        store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=read_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
    )
    guess = with_node_numbers(topology)
    node_rank = read_number(env, "GROUP_RANK", "NODE_RANK", "CROSS_RANK", default=guess.node_rank)
    nodes = read_number(env, "GROUP_WORLD_SIZE", "CROSS_SIZE", least=1, default=guess.num_nodes)
    return attrs.evolve(topology, node_rank=node_rank, num_nodes=nodes)
