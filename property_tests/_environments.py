"""Environments as launchers make them."""

import attrs
from hypothesis import assume
from hypothesis import strategies as st

from fxtrain.state.topology import Topology


@st.composite
def placements(draw):
    """Which ranks each node holds; a scheduler may fill nodes unevenly, and in turn."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    assume(sum(sizes) > 1)
    free = [node for node, size in enumerate(sizes) for _ in range(size)]
    # Rank 0 is on the first node, whatever the order of the others.
    order = [free[0], *draw(st.one_of(st.just(free[1:]), st.permutations(free[1:])))]
    return tuple(
        tuple(rank for rank, node in enumerate(order) if node == here) for here in range(len(sizes))
    )


@st.composite
def blocks(draw):
    """Nodes of equal size, filled one after the other, as torchrun and mpirun do it."""
    size, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    assume(size * nodes > 1)
    return tuple(tuple(range(node * size, (node + 1) * size)) for node in range(nodes))


def some_topology(nodes, rank, launcher):
    node = next(i for i, ranks in enumerate(nodes) if rank in ranks)
    return Topology(
        rank=rank,
        world_size=sum(map(len, nodes)),
        local_rank=nodes[node].index(rank),
        local_world_size=len(nodes[node]),
        node_rank=node,
        num_nodes=len(nodes),
        launcher=launcher,
        main_address="host",
        main_port=29511,
    )


def main_of(_):
    return {"MASTER_ADDR": "host", "MASTER_PORT": 29511}


def plain_env(t):
    return {
        "RANK": t.rank,
        "WORLD_SIZE": t.world_size,
        "LOCAL_RANK": t.local_rank,
        "LOCAL_WORLD_SIZE": t.local_world_size,
        **main_of(t),
    }


def torchrun_env(t):
    return {
        **plain_env(t),
        "GROUP_RANK": t.node_rank,
        "GROUP_WORLD_SIZE": t.num_nodes,
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": t.store_is_served,
        "TORCHELASTIC_RESTART_COUNT": t.attempt,
    }


def slurm_env(t, nodes):
    return {
        "SLURM_PROCID": t.rank,
        "SLURM_STEP_NUM_TASKS": t.world_size,
        "SLURM_LOCALID": t.local_rank,
        "SLURM_NODEID": t.node_rank,
        "SLURM_STEP_NUM_NODES": t.num_nodes,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_TASKS_PER_NODE": short_form([len(ranks) for ranks in nodes]),
        "SLURM_STEP_NODELIST": "host[01-09]",
        "SLURM_JOB_ID": 19511,
    }


def short_form(sizes):
    """SLURM's way to write equal neighbors: 2(x3),1."""
    runs = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return ",".join(f"{size}(x{times})" if times > 1 else str(size) for size, times in runs)


def openmpi_env(t):
    prefix = "OMPI_COMM_WORLD_"
    return {
        f"{prefix}RANK": t.rank,
        f"{prefix}SIZE": t.world_size,
        f"{prefix}LOCAL_RANK": t.local_rank,
        f"{prefix}LOCAL_SIZE": t.local_world_size,
        **main_of(t),
    }


def mpich_env(t, names=("MPI_LOCALRANKID", "MPI_LOCALNRANKS")):
    return {
        "PMI_RANK": t.rank,
        "PMI_SIZE": t.world_size,
        names[0]: t.local_rank,
        names[1]: t.local_world_size,
        **main_of(t),
    }


def cray_env(t):
    return {**mpich_env(t, ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")), "PALS_RANKID": t.rank}


def pjrt_env(t):
    return {
        "PJRT_DEVICE": "TPU",
        "PJRT_LOCAL_PROCESS_RANK": t.local_rank,
        "PJRT_LOCAL_PROCESS_COUNT": t.local_world_size,
        "TPU_WORKER_ID": t.node_rank,
        "TPU_WORKER_HOSTNAMES": ",".join(["host", *[f"h{i}" for i in range(1, t.num_nodes)]]),
        "MASTER_PORT": 29511,
    }


BLOCKED = {
    "torchrun": (torchrun_env, "torchrun"),
    "plain": (plain_env, "plain"),
    "openmpi": (openmpi_env, "openmpi"),
    "mpich": (mpich_env, "mpich"),
    "cray": (cray_env, "mpich"),
    "pjrt": (pjrt_env, "pjrt"),
}


def as_strings(env):
    return {name: str(value) for name, value in env.items()}


@st.composite
def launched(draw, kinds=(*BLOCKED, "slurm")):
    """A topology, and the variables by which its launcher tells of it."""
    kind = draw(st.sampled_from(kinds))
    nodes = draw(placements() if kind == "slurm" else blocks())
    rank = draw(st.integers(0, sum(map(len, nodes)) - 1))
    if kind == "slurm":
        topology = some_topology(nodes, rank, kind)
        alone = topology.num_nodes == 1
        at = attrs.evolve(topology, main_address="127.0.0.1" if alone else "host01")
        return at, as_strings(slurm_env(topology, nodes))
    make, launcher = BLOCKED[kind]
    topology = some_topology(nodes, rank, launcher)
    if kind == "torchrun":
        served, attempt = draw(st.booleans()), draw(st.integers(0, 3))
        topology = attrs.evolve(topology, store_is_served=served, attempt=attempt)
    if kind == "pjrt" and topology.num_nodes == 1:
        topology = attrs.evolve(topology, main_address="127.0.0.1")
    return topology, as_strings(make(topology))
