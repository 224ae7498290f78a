"""Laws of reading the environment: what a launcher says comes back, damage is named."""

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.state import Topology, read_topology


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


def _topology(nodes, rank, launcher):
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


def _meeting(_):
    return {"MASTER_ADDR": "host", "MASTER_PORT": 29511}


def _plain(t):
    return {
        "RANK": t.rank,
        "WORLD_SIZE": t.world_size,
        "LOCAL_RANK": t.local_rank,
        "LOCAL_WORLD_SIZE": t.local_world_size,
        **_meeting(t),
    }


def _torchrun(t):
    return {
        **_plain(t),
        "GROUP_RANK": t.node_rank,
        "GROUP_WORLD_SIZE": t.num_nodes,
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": t.store_is_served,
        "TORCHELASTIC_RESTART_COUNT": t.attempt,
    }


def _slurm(t, nodes):
    return {
        "SLURM_PROCID": t.rank,
        "SLURM_STEP_NUM_TASKS": t.world_size,
        "SLURM_LOCALID": t.local_rank,
        "SLURM_NODEID": t.node_rank,
        "SLURM_STEP_NUM_NODES": t.num_nodes,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_TASKS_PER_NODE": _short_form([len(ranks) for ranks in nodes]),
        "SLURM_STEP_NODELIST": "host[01-09]",
        "SLURM_JOB_ID": 19511,
    }


def _short_form(sizes):
    """SLURM's way to write equal neighbours: 2(x3),1."""
    runs = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return ",".join(f"{size}(x{times})" if times > 1 else str(size) for size, times in runs)


def _openmpi(t):
    prefix = "OMPI_COMM_WORLD_"
    return {
        f"{prefix}RANK": t.rank,
        f"{prefix}SIZE": t.world_size,
        f"{prefix}LOCAL_RANK": t.local_rank,
        f"{prefix}LOCAL_SIZE": t.local_world_size,
        **_meeting(t),
    }


def _mpich(t, names=("MPI_LOCALRANKID", "MPI_LOCALNRANKS")):
    return {
        "PMI_RANK": t.rank,
        "PMI_SIZE": t.world_size,
        names[0]: t.local_rank,
        names[1]: t.local_world_size,
        **_meeting(t),
    }


def _cray(t):
    return {**_mpich(t, ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")), "PALS_RANKID": t.rank}


def _pjrt(t):
    return {
        "PJRT_DEVICE": "TPU",
        "PJRT_LOCAL_PROCESS_RANK": t.local_rank,
        "PJRT_LOCAL_PROCESS_COUNT": t.local_world_size,
        "TPU_WORKER_ID": t.node_rank,
        "TPU_WORKER_HOSTNAMES": ",".join(["host", *[f"h{i}" for i in range(1, t.num_nodes)]]),
        "MASTER_PORT": 29511,
    }


BLOCKED = {
    "torchrun": (_torchrun, "torchrun"),
    "plain": (_plain, "plain"),
    "openmpi": (_openmpi, "openmpi"),
    "mpich": (_mpich, "mpich"),
    "cray": (_cray, "mpich"),
    "pjrt": (_pjrt, "pjrt"),
}


def _strings(env):
    return {name: str(value) for name, value in env.items()}


@st.composite
def launched(draw, kinds=(*BLOCKED, "slurm")):
    """A topology, and the variables by which its launcher tells of it."""
    kind = draw(st.sampled_from(kinds))
    nodes = draw(placements() if kind == "slurm" else blocks())
    rank = draw(st.integers(0, sum(map(len, nodes)) - 1))
    if kind == "slurm":
        topology = _topology(nodes, rank, kind)
        alone = topology.num_nodes == 1
        at = attrs.evolve(topology, main_address="127.0.0.1" if alone else "host01")
        return at, _strings(_slurm(topology, nodes))
    make, launcher = BLOCKED[kind]
    topology = _topology(nodes, rank, launcher)
    if kind == "torchrun":
        served, attempt = draw(st.booleans()), draw(st.integers(0, 3))
        topology = attrs.evolve(topology, store_is_served=served, attempt=attempt)
    if kind == "pjrt" and topology.num_nodes == 1:
        topology = attrs.evolve(topology, main_address="127.0.0.1")
    return topology, _strings(make(topology))


@given(case=launched())
def test_every_launcher_reads_back(case):
    topology, env = case
    before = dict(env)
    assert read_topology(env) == topology
    assert env == before


USUAL = ["PATH", "HOME", "SLURM_JOB_NAME", "SLURM_CPUS_PER_TASK", "SLURM_GTIDS", "PMI_FD"]
USUAL += ["OMPI_MCA_btl", "PMIX_RANK", "ROLE_RANK", "CUDA_VISIBLE_DEVICES", "TPU_NAME", "PYTHON"]
noise = st.dictionaries(st.one_of(st.sampled_from(USUAL), st.text("QZ_", min_size=1)), st.text())


@given(case=launched(), noise=noise)
def test_other_variables_do_not_matter(case, noise):
    topology, env = case
    assert read_topology({**noise, **env}) == topology


@given(case=launched(), inner=launched(kinds=("torchrun",)))
def test_torchrun_inside_anything_is_torchrun(case, inner):
    topology, env = inner
    assert read_topology({**case[1], **env}) == topology


NO_NUMBERS = ["", " ", "x", "-1", "1.5", "0x1", "1e3", "٣", "1_0", "9" * 40, "\N{NULL}", "1 2"]
FREE_TEXT = {"MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PJRT_DEVICE"}
FREE_TEXT |= {"SLURM_STEP_NODELIST", "TPU_WORKER_HOSTNAMES", "PALS_RANKID", "SLURM_STEP_ID"}


@given(data=st.data(), case=launched())
def test_a_value_that_is_no_number_is_named(data, case):
    _, env = case
    name = data.draw(st.sampled_from(sorted(env.keys() - FREE_TEXT)))
    env[name] = data.draw(st.sampled_from(NO_NUMBERS))
    with pytest.raises(fx.ContextError, match=name):
        read_topology(env)


NEEDED = {
    "torchrun": {"RANK", "WORLD_SIZE", "MASTER_PORT"},
    "plain": {"RANK", "WORLD_SIZE", "MASTER_PORT"},
    "slurm": {"SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"},
    "openmpi": {f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")},
    "mpich": {"PMI_SIZE"},
    "pjrt": {"PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"},
}
NEEDED_BY_NODES = {
    "torchrun": {"MASTER_ADDR"},
    "plain": {"MASTER_ADDR"},
    "slurm": {"SLURM_NODEID"},
    "openmpi": {"MASTER_ADDR", "MASTER_PORT"},
    "mpich": {"MASTER_ADDR", "MASTER_PORT"},
    "pjrt": {"TPU_WORKER_ID"},
}


@given(data=st.data(), case=launched())
def test_a_missing_variable_is_named(data, case):
    topology, env = case
    names = NEEDED[topology.launcher]
    if topology.num_nodes > 1:
        names = names | NEEDED_BY_NODES[topology.launcher]
    name = data.draw(st.sampled_from(sorted(names & env.keys())))
    del env[name]
    with pytest.raises(fx.ContextError, match=name):
        read_topology(env)


RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LOCAL_RANKS += ("PMI_LOCAL_RANK", "PJRT_LOCAL_PROCESS_RANK")
NODES = ("GROUP_RANK", "SLURM_NODEID", "TPU_WORKER_ID")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


@pytest.mark.parametrize(
    ("names", "limit"),
    [
        (RANKS, "world_size"),
        (LOCAL_RANKS, "local_world_size"),
        (NODES, "num_nodes"),
        (LOCAL_SIZES, "world_size"),
    ],
)
@given(case=launched(), beyond=st.integers(0, 3))
def test_a_number_beyond_its_count_is_a_contradiction(names, limit, case, beyond):
    topology, env = case
    name = next((name for name in names if name in env), None)
    assume(name is not None)
    # As many ranks on one node as there are in all is fine; one more is not.
    env[name] = str(getattr(topology, limit) + beyond + (names is LOCAL_SIZES))
    with pytest.raises(fx.ContextError, match=rf"{name}={env[name]}"):
        read_topology(env)


@given(case=launched(kinds=("slurm", "openmpi", "mpich", "cray", "pjrt")), world=st.integers(1, 6))
def test_a_world_size_beside_a_scheduler_must_agree(case, world):
    topology, env = case
    if world == topology.world_size:
        assert read_topology({**env, "WORLD_SIZE": str(world)}) == topology
    else:
        with pytest.raises(fx.ContextError, match=f"WORLD_SIZE={world}"):
            read_topology({**env, "WORLD_SIZE": str(world)})


@given(case=launched(), port=st.one_of(st.just(0), st.integers(65_536, 1 << 30)))
def test_an_impossible_port_is_named(case, port):
    with pytest.raises(fx.ContextError, match=f"MASTER_PORT='{port}'"):
        read_topology({**case[1], "MASTER_PORT": str(port)})


known = sorted(
    {name for kind, (make, _) in BLOCKED.items() for name in make(_topology(((0, 1),), 0, kind))}
    | _slurm(_topology(((0, 1),), 0, "slurm"), ((0, 1),)).keys()
    | {"SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "MEGASCALE_NUM_SLICES"}
    | {"SLURM_PTY_PORT", "SLURM_JOB_NAME", "NODE_RANK", "LOCAL_SIZE", "PMIX_NAMESPACE"}
)
values = st.one_of(
    st.integers(0, 4).map(str),
    st.sampled_from(["2(x3),1", "1(x2)", "n[1-2],x", "n[", "a,b", "[]", "bash", *NO_NUMBERS]),
    st.text(max_size=6),
)


def _check_is_a_place(found):
    assert 0 <= found.rank < found.world_size
    assert 0 <= found.local_rank < found.local_world_size <= found.world_size
    assert 0 <= found.node_rank < found.num_nodes
    assert found.main_address and 0 <= found.main_port < 65_536
    assert found.world_size == 1 or found.main_port


@given(env=st.dictionaries(st.sampled_from(known), values))
def test_any_environment_is_a_place_or_a_context_error(env):
    try:
        found = read_topology(env)
    except fx.ContextError as error:
        assert str(error)
    else:
        _check_is_a_place(found)


@given(case=launched(), damage=st.dictionaries(st.sampled_from(known), values, max_size=3))
def test_any_damage_is_a_place_or_a_context_error(case, damage):
    try:
        found = read_topology({**case[1], **damage})
    except fx.ContextError as error:
        assert str(error)
    else:
        _check_is_a_place(found)
