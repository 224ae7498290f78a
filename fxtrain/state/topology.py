"""The rank of a process, from the variables of its launcher: one pure reader per launcher."""

import re
import zlib
from collections.abc import Callable, Mapping

import attrs

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
# Launcher, and the variables of rank, world size, local rank and local world size.
_MPI = (
    (
        "openmpi",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    (
        "mpich",  # and Intel MPI; Cray's PMI and PALS; MVAPICH
        ("PMI_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID"),
        ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MV2_COMM_WORLD_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
)
_RANKS = tuple(name for row in _MPI for name in row[1])
_SIZES = tuple(name for row in _MPI for name in row[2])
_PORT = 29_500  # torch's default
# slurm.h: larger numbers are the batch script, the shell that salloc opens, and the like.
_LAST_STEP = 0xFFFF_FFF0
_SHELLS = ("bash", "csh", "fish", "ksh", "sh", "tcsh", "zsh")
_SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_PORTS = range(10_000, 30_000)  # below the ports that systems assign
# SLURM's largest jobs are far smaller; a longer list is a mistake that would fill the memory.
_MOST_NODES = 100_000


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
    for present, read in _READERS:
        if present(env):
            return checked_topology(read(env), env)
    return Topology()


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


def _mpi(env: _Env) -> Topology:
    launcher, ranks, sizes, local_ranks, local_sizes = next(
        row for row in _MPI if any(name in env for name in (*row[1], *row[2]))
    )
    world_size = read_number(env, *sizes, least=1)
    alone = 1 if world_size == 1 else None
    topology = with_node_numbers(
        Topology(
            rank=read_number(env, *ranks),
            world_size=world_size,
            local_rank=read_number(env, *local_ranks, default=alone and 0),
            local_world_size=read_number(env, *local_sizes, least=1, default=alone),
            launcher=launcher,
            main_address="",
        )
    )
    # mpirun names the job for all of its ranks; without a name, assume one job per machine.
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    named = 10_000 + zlib.crc32(job.encode()) % 19_000 if job else 0
    port = named or (_PORT if topology.num_nodes == 1 else 0)
    return attrs.evolve(topology, main_port=port if world_size > 1 else 0)


def _pjrt(env: _Env) -> Topology:
    """One process per TPU host, or several if torch_xla started them."""
    slices = read_number(env, "MEGASCALE_NUM_SLICES", least=1, default=1)
    if slices > 1:
        raise ContextError(
            f"MEGASCALE_NUM_SLICES={slices}: PJRT's variables describe one slice only. Set RANK, "
            f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process of all slices.",
            code="FX101",
        )
    names = ("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")
    both = None if any(name in env for name in names) else 1
    local_rank = read_number(env, names[0], default=both and 0)
    local_world = read_number(env, names[1], least=1, default=both)
    hosts = [host.strip() for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",")]
    hosts = [host for host in hosts if host]
    node_rank = read_number(env, "TPU_WORKER_ID", default=0 if len(hosts) < 2 else None)
    num_nodes = max(1, len(hosts))
    return Topology(
        rank=node_rank * local_world + local_rank,
        world_size=num_nodes * local_world,
        local_rank=local_rank,
        local_world_size=local_world,
        node_rank=node_rank,
        num_nodes=num_nodes,
        launcher="pjrt",
        main_address=hosts[0] if len(hosts) > 1 else "",
        # Not 8476 or 12355, which libtpu and torch_xla use.
        main_port=_PORT if num_nodes * local_world > 1 else 0,
    )


def _is_step(env: _Env) -> bool:
    """Whether SLURM started the ranks, even with variables of an MPI for them.

    mpirun inside a job has srun start one helper per node, whose step its ranks inherit;
    then the two differ.
    """
    return (
        in_step(env)
        and all(env[name] == env["SLURM_PROCID"] for name in _RANKS if name in env)
        and all(env[name] == step_size(env) for name in _SIZES if name in env)
    )


def _has(*names: str) -> Callable[[_Env], bool]:
    return lambda env: any(name in env for name in names)


def in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of its tasks.

    A batch script and a shell of salloc have SLURM_PROCID=0 and SLURM_NTASKS too, but no
    step, or one with a reserved number. An interactive shell from `srun --pty bash` is step 0
    of a job that SLURM named after the shell. The job's name alone is not enough: processes
    that srun starts inside such a shell inherit it, and so does `srun bash train.sh`.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "")).strip()
    if "SLURM_PROCID" not in env or not re.fullmatch("[0-9]{1,18}", step):
        return False
    shell = int(step) == 0 and "SLURM_PTY_PORT" in env and env.get("SLURM_JOB_NAME") in _SHELLS
    return int(step) < _LAST_STEP and not shell


def step_size(env: Mapping[str, str]) -> str | None:
    """How many tasks the step has, as SLURM wrote it."""
    return next((env[name] for name in _SLURM_SIZES if name in env), None)


def read_slurm(env: Mapping[str, str]) -> Topology:
    """The topology of a step; variables of the whole job only fill the gaps."""
    world_size = read_number(env, *_SLURM_SIZES, least=1)
    rank = read_number(env, "SLURM_PROCID")
    tasks = _tasks_per_node(env, world_size)
    node_rank = read_number(env, "SLURM_NODEID", default=0 if len(tasks) == 1 else None)
    if node_rank >= len(tasks):
        raise ContextError(
            f"SLURM_NODEID={node_rank}, but the step has {len(tasks)} nodes (SLURM_STEP_NUM_NODES, "
            f"SLURM_STEP_TASKS_PER_NODE). Start the ranks with one srun.",
            code="FX101",
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=read_number(env, "SLURM_LOCALID", default=0 if world_size == 1 else None),
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=len(tasks),
        launcher="slurm",
        main_address=_main_address(env) if len(tasks) > 1 else "",
        main_port=_port(env) if world_size > 1 else 0,
    )


def _port(env: Mapping[str, str]) -> int:
    """One port per job and step, so that those on the same node do not collide."""
    job = read_number(env, "SLURM_JOB_ID", "SLURM_JOBID", most=1 << 32, default=0)
    step = read_number(env, "SLURM_STEP_ID", "SLURM_STEPID", most=_LAST_STEP, default=0)
    return _PORTS[(job + 4_999 * step) % len(_PORTS)]


def _tasks_per_node(env: Mapping[str, str], world_size: int) -> list[int]:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name = next((name for name in names if name in env), None)
    counts = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    num_nodes = read_number(env, *counts, least=1, most=_MOST_NODES, default=1)
    if name is None:
        each = read_number(
            env, "SLURM_NTASKS_PER_NODE", least=1, default=-(-world_size // num_nodes)
        )
        if each * num_nodes != world_size:
            raise ContextError(
                f"{world_size} tasks (SLURM_NTASKS) are not {each} on each of {num_nodes} nodes "
                f"(SLURM_NNODES), and SLURM_STEP_TASKS_PER_NODE is not set. Start the ranks "
                f"with srun.",
                code="FX101",
            )
        return [each] * num_nodes
    tasks = _expand(name, env[name])
    nodes = read_number(env, "SLURM_STEP_NUM_NODES", least=1, default=len(tasks))
    if (sum(tasks), len(tasks)) != (world_size, nodes):
        raise ContextError(
            f"{name}={env[name]!r} describes {sum(tasks)} tasks on {len(tasks)} nodes, but the "
            f"step has {world_size} on {nodes} (SLURM_STEP_NUM_TASKS or SLURM_NTASKS, "
            f"SLURM_STEP_NUM_NODES). Start the ranks with one srun.",
            code="FX101",
        )
    return tasks


def _expand(name: str, text: str) -> list[int]:
    """The numbers in SLURM's short form: 2(x3),1 is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        tasks_of = re.fullmatch(r"\s*([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?\s*", part)
        if not tasks_of or len(tasks) > _MOST_NODES:
            raise ContextError(
                f"{name}={text[:60]!r}: expected numbers of tasks such as 2(x3),1. Start the "
                f"ranks with srun, which sets it.",
                code="FX101",
            )
        tasks += [int(tasks_of[1])] * int(tasks_of[2] or 1)
    return tasks


def _main_address(env: Mapping[str, str]) -> str:
    """First host of SLURM's short form: n[001-003,7],x1 begins with n001."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name = next((name for name in names if env.get(name)), None)
    if name is None or env.get("MASTER_ADDR", "").strip():
        return ""
    part = r"[^\s\[\],]*(?:\[[^\[\]]+\][^\s\[\],]*)*"
    host_list = re.match(rf"\s*({part})\s*(?:,|$)", env[name])
    host = re.sub(r"\[\s*([0-9A-Za-z]+)[^\]]*\]", r"\1", host_list[1]) if host_list else ""
    if not host or "[" in host:
        raise ContextError(
            f"{name}={env[name][:60]!r}: expected a list of hosts such as n[001-003,7],x1. Set "
            f"MASTER_ADDR to the host name of rank 0.",
            code="FX101",
        )
    return host


_READERS: tuple[tuple[Callable[[_Env], bool], Callable[[_Env], Topology]], ...] = (
    (_has("RANK"), _torch_like),
    (_is_step, read_slurm),
    (_has(*_RANKS, *_SIZES), _mpi),
    (_has("PJRT_DEVICE"), _pjrt),
    (_has("WORLD_SIZE"), _torch_like),  # job scripts often set it for srun's processes
)
