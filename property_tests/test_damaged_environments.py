"""Environments of launchers with damage: a topology or a context error."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.state.topology import read_topology
from property_tests._environments import BLOCKED, launched, slurm_env, some_topology
from tests._errors import raises_code

NO_NUMBERS = ["", " ", "x", "-1", "1.5", "0x1", "1e3", "٣", "1_0", "9" * 40, "\N{NULL}", "1 2"]
FREE_TEXT = {"MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PJRT_DEVICE"}
FREE_TEXT |= {"SLURM_STEP_NODELIST", "TPU_WORKER_HOSTNAMES", "PALS_RANKID", "SLURM_STEP_ID"}


@given(data=st.data(), case=launched())
def test_a_value_that_is_no_number_is_named(data, case):
    _, env = case
    name = data.draw(st.sampled_from(sorted(env.keys() - FREE_TEXT)))
    env[name] = data.draw(st.sampled_from(NO_NUMBERS))
    with pytest.raises(fx.errors.ContextError, match=name):
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
    with pytest.raises(fx.errors.ContextError, match=name):
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
    with raises_code("FX101", f"{name}={env[name]}"):
        read_topology(env)


@given(case=launched(kinds=("slurm", "openmpi", "mpich", "cray", "pjrt")), world=st.integers(1, 6))
def test_a_world_size_beside_a_scheduler_must_agree(case, world):
    topology, env = case
    if world == topology.world_size:
        assert read_topology({**env, "WORLD_SIZE": str(world)}) == topology
    else:
        with raises_code("FX101", f"WORLD_SIZE={world}"):
            read_topology({**env, "WORLD_SIZE": str(world)})


@given(case=launched(), port=st.one_of(st.just(0), st.integers(65_536, 1 << 30)))
def test_an_impossible_port_is_named(case, port):
    with raises_code("FX101", f"MASTER_PORT='{port}'"):
        read_topology({**case[1], "MASTER_PORT": str(port)})


known = sorted(
    {
        name
        for kind, (make, _) in BLOCKED.items()
        for name in make(some_topology(((0, 1),), 0, kind))
    }
    | slurm_env(some_topology(((0, 1),), 0, "slurm"), ((0, 1),)).keys()
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
    except fx.errors.ContextError as error:
        assert str(error)
    else:
        _check_is_a_place(found)


@given(case=launched(), damage=st.dictionaries(st.sampled_from(known), values, max_size=3))
def test_any_damage_is_a_place_or_a_context_error(case, damage):
    try:
        found = read_topology({**case[1], **damage})
    except fx.errors.ContextError as error:
        assert str(error)
    else:
        _check_is_a_place(found)
