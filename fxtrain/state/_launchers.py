"""From environment variables to a topology: one pure reader per launcher."""

import re
from collections.abc import Callable, Mapping

from fxtrain._errors import ContextError
from fxtrain.state._topology import Topology

__all__ = ["read_topology"]

_Env = Mapping[str, str]


def read_topology(env: Mapping[str, str]) -> Topology:
    """Find this rank's place in the variables that a launcher left.

    RANK and WORLD_SIZE (torchrun or set by hand) win over a scheduler's variables, since
    torchrun often runs inside one. SLURM counts only in a step that srun started; MASTER_ADDR
    and MASTER_PORT win over the addresses derived from a scheduler.

    Args:
        env: Variables by name; not changed.

    Raises:
        ContextError: variables are missing, contradict each other, or are not numbers in
            range; the message names them.

    Example:
        >>> from fxtrain.state import read_topology
        >>> read_topology({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        ...                "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        ...                "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}).launcher
        'openmpi'
    """
    for present, read in _READERS:
        if present(env):
            topology = read(env)
            _check(topology, env)
            return topology
    return Topology()


def _torch_like(env: _Env) -> Topology:
    elastic = "TORCHELASTIC_RUN_ID" in env
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE", least=1)
    one_node = world_size if elastic or "LOCAL_RANK" in env else 1
    local_world = _number(env, "LOCAL_WORLD_SIZE", least=1, default=one_node)
    local_rank = _number(env, "LOCAL_RANK", default=rank % local_world)
    return _place(
        env,
        "torchrun" if elastic else "plain",
        rank,
        world_size,
        local_rank,
        local_world,
        node_rank=_number(env, "GROUP_RANK", default=rank // local_world),
        store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _slurm(env: _Env) -> Topology:
    rank, world_size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS", least=1)
    node_rank = _number(env, "SLURM_NODEID", default=0)
    num_nodes = _number(env, "SLURM_NNODES", least=1, default=1)
    tasks = _tasks_per_node(env, world_size, num_nodes)
    if node_rank >= len(tasks):
        raise ContextError(
            f"SLURM_NODEID={node_rank}, but SLURM_STEP_TASKS_PER_NODE describes {len(tasks)} "
            f"nodes. Start the ranks with srun, once."
        )
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    return _place(
        env,
        "slurm",
        rank,
        world_size,
        _number(env, "SLURM_LOCALID", default=rank),
        tasks[node_rank],
        node_rank=node_rank,
        num_nodes=len(tasks),
        address=_first_host(nodes) if nodes else None,
        # One port per job, so that jobs that share a node do not meet.
        port=10_000 + _number(env, "SLURM_JOB_ID", default=0) % 20_000,
    )


def _open_mpi(env: _Env) -> Topology:
    prefix = "OMPI_COMM_WORLD_"
    return _place(
        env,
        "openmpi",
        _number(env, f"{prefix}RANK"),
        _number(env, f"{prefix}SIZE", least=1),
        _number(env, f"{prefix}LOCAL_RANK"),
        _number(env, f"{prefix}LOCAL_SIZE", least=1),
    )


def _mpich(env: _Env) -> Topology:
    rank, world_size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE", least=1)
    names = (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    )
    local_rank, local_world = next((pair for pair in names if pair[0] in env), names[0])
    return _place(
        env,
        "mpich",
        rank,
        world_size,
        _number(env, local_rank, default=rank),
        _number(env, local_world, least=1, default=world_size),
    )


def _pjrt(env: _Env) -> Topology:
    local_world = _number(env, "PJRT_LOCAL_PROCESS_COUNT", least=1, default=1)
    local_rank = _number(env, "PJRT_LOCAL_PROCESS_RANK", default=0)
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "localhost").split(",") if host]
    num_nodes = max(1, len(hosts))
    node_rank = _number(env, "TPU_WORKER_ID", default=0)
    return _place(
        env,
        "pjrt",
        node_rank * local_world + local_rank,
        num_nodes * local_world,
        local_rank,
        local_world,
        node_rank=node_rank,
        num_nodes=num_nodes,
        address=hosts[0] if hosts else "localhost",
        port=8476,
    )


def _in_srun(env: _Env) -> bool:
    # sbatch and salloc set SLURM_NTASKS and SLURM_PROCID=0 too; only srun names a step, and
    # an interactive `srun bash` calls its one task "bash".
    return (
        "SLURM_PROCID" in env
        and env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "")).isdigit()
        and env.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    )


_READERS: tuple[tuple[Callable[[_Env], bool], Callable[[_Env], Topology]], ...] = (
    (lambda env: "RANK" in env or "WORLD_SIZE" in env, _torch_like),
    (lambda env: any(name.startswith("OMPI_COMM_WORLD_") for name in env), _open_mpi),
    (lambda env: "PMI_RANK" in env or "PMI_SIZE" in env, _mpich),
    (_in_srun, _slurm),
    (lambda env: "PJRT_DEVICE" in env, _pjrt),
)


def _place(
    env: _Env,
    launcher: str,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world: int,
    *,
    node_rank: int | None = None,
    num_nodes: int | None = None,
    address: str | None = None,
    port: int | None = None,
    store_is_served: bool = False,
    attempt: int = 0,
) -> Topology:
    nodes = -(-world_size // local_world) if num_nodes is None else num_nodes
    if world_size > 1:
        missing = [
            name
            for name, known in (("MASTER_ADDR", address), ("MASTER_PORT", port))
            if name not in env and known is None and (name == "MASTER_PORT" or nodes > 1)
        ]
        if missing and not (launcher in ("openmpi", "mpich") and nodes == 1):
            raise ContextError(
                f"{launcher}: {world_size} ranks need {' and '.join(missing)} to meet, which "
                f"{'is' if len(missing) == 1 else 'are'} not set. Set the host name of rank 0 "
                f"and a free port on it for every rank, or use `fxtrain launch` or torchrun."
            )
    default_port = 29500 if port is None and world_size > 1 else (port or 0)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world,
        node_rank=rank // local_world if node_rank is None else node_rank,
        num_nodes=nodes,
        launcher=launcher,
        main_address=env.get("MASTER_ADDR") or address or "127.0.0.1",
        main_port=_number(env, "MASTER_PORT", default=default_port),
        store_is_served=store_is_served,
        attempt=attempt,
    )


def _check(topology: Topology, env: _Env) -> None:
    t = topology
    problems = [
        text
        for wrong, text in (
            (t.rank >= t.world_size, f"rank {t.rank} of {t.world_size}"),
            (
                t.local_rank >= t.local_world_size,
                f"local rank {t.local_rank} of {t.local_world_size} on its node",
            ),
            (
                t.local_world_size > t.world_size,
                f"{t.local_world_size} ranks on this node, but {t.world_size} in all",
            ),
            (t.local_rank > t.rank, f"local rank {t.local_rank} above rank {t.rank}"),
            (t.node_rank >= t.num_nodes, f"node {t.node_rank} of {t.num_nodes}"),
            (t.main_port > 65_535, f"port {t.main_port}, above 65535"),
            (t.main_port == 0 and t.world_size > 1, "port 0, which no rank can find"),
        )
        if wrong
    ]
    if problems:
        shown = ", ".join(f"{name}={env[name]}" for name in sorted(env) if _RELEVANT.match(name))
        raise ContextError(
            f"The variables of {t.launcher} contradict each other: {'; '.join(problems)}. "
            f"Found {shown}. Start every rank with the same launcher, or unset what is left "
            f"over from another one."
        )


_RELEVANT = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|OMPI_COMM_WORLD_|PMI_|MPI_LOCAL"
    r"|PALS_LOCAL|SLURM_(PROCID|NTASKS|LOCALID|NODEID|NNODES|STEP_TASKS_PER_NODE)|PJRT_|TPU_WORKER"
)


def _number(env: _Env, name: str, *, least: int = 0, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ContextError(
                f"{name} is not set, though other variables of its launcher are. Set it, or "
                f"unset the others to run alone."
            )
        return default
    if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) or int(text) < least:
        raise ContextError(f"{name}={text!r}: a whole number of at least {least} was expected.")
    return int(text)


def _tasks_per_node(env: _Env, world_size: int, num_nodes: int) -> list[int]:
    """Expand SLURM's short form: 2(x3),1 is 2, 2, 2, 1."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None:
        if world_size % num_nodes:
            raise ContextError(
                f"SLURM_NTASKS={world_size} does not divide by SLURM_NNODES={num_nodes}, and "
                f"SLURM_STEP_TASKS_PER_NODE is not set. Start the ranks with srun."
            )
        return [world_size // num_nodes] * num_nodes
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?", part.strip())
        if not found:
            raise ContextError(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected a form as 2(x3),1.")
        tasks += [int(found[1])] * int(found[2] or 1)
    if sum(tasks) != world_size:
        raise ContextError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} adds up to {sum(tasks)} ranks, but "
            f"SLURM_NTASKS={world_size}. Start the ranks with one srun."
        )
    return tasks


def _first_host(nodes: str) -> str:
    """First host of SLURM's short form: n[001-003,7],x1 begins with n001."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes.strip())
    assert found is not None  # every part of the pattern may be empty
    return f"{found[1]}{found[2] or ''}{found[3] or ''}"
