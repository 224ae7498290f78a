"""The rank of a process, from the variables of MPI, SLURM and PJRT: one pure reader for each."""

import re
import zlib
from collections.abc import Mapping

import attrs

from fxtrain.errors import ContextError
from fxtrain.state.topology import Topology, read_number, with_node_numbers

_Env = Mapping[str, str]
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


def job_topology(env: _Env) -> Topology | None:
    """The topology of a job's rank; None if no scheduler has started this process."""
    if _is_step(env):
        return _slurm(env)
    if any(name in env for name in (*_RANKS, *_SIZES)):
        return _mpi(env)
    return _pjrt(env) if "PJRT_DEVICE" in env else None


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
        _in_step(env)
        and all(env[name] == env["SLURM_PROCID"] for name in _RANKS if name in env)
        and all(env[name] == _step_size(env) for name in _SIZES if name in env)
    )


def _in_step(env: Mapping[str, str]) -> bool:
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


def _step_size(env: Mapping[str, str]) -> str | None:
    """How many tasks the step has, as SLURM wrote it."""
    return next((env[name] for name in _SLURM_SIZES if name in env), None)


def _slurm(env: Mapping[str, str]) -> Topology:
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
