"""Laws of reading the environment: what a launcher says comes back, damage is named."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.state import Topology, read_topology


@st.composite
def places(draw):
    local_world = draw(st.integers(1, 4))
    nodes = draw(st.integers(1, 4))
    assume(local_world * nodes > 1)
    rank = draw(st.integers(0, local_world * nodes - 1))
    return rank, local_world, nodes


def _torchrun(rank, local_world, nodes):
    return {
        "RANK": rank,
        "WORLD_SIZE": local_world * nodes,
        "LOCAL_RANK": rank % local_world,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": rank // local_world,
        "MASTER_ADDR": "host",
        "MASTER_PORT": 29511,
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": 0,
    }


def _plain(rank, local_world, nodes):
    wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in _torchrun(rank, local_world, nodes).items() if k in wanted}


def _slurm(rank, local_world, nodes):
    return {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": local_world * nodes,
        "SLURM_LOCALID": rank % local_world,
        "SLURM_NODEID": rank // local_world,
        "SLURM_NNODES": nodes,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_TASKS_PER_NODE": f"{local_world}(x{nodes})",
        "SLURM_STEP_NODELIST": "host[01-09]",
        "SLURM_JOB_ID": 19511,
    }


def _openmpi(rank, local_world, nodes):
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": local_world * nodes,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank % local_world,
        "OMPI_COMM_WORLD_LOCAL_SIZE": local_world,
        "MASTER_ADDR": "host",
        "MASTER_PORT": 29511,
    }


def _mpich(rank, local_world, nodes):
    return {
        "PMI_RANK": rank,
        "PMI_SIZE": local_world * nodes,
        "MPI_LOCALRANKID": rank % local_world,
        "MPI_LOCALNRANKS": local_world,
        "MASTER_ADDR": "host",
        "MASTER_PORT": 29511,
    }


def _pjrt(rank, local_world, nodes):
    return {
        "PJRT_DEVICE": "TPU",
        "PJRT_LOCAL_PROCESS_RANK": rank % local_world,
        "PJRT_LOCAL_PROCESS_COUNT": local_world,
        "TPU_WORKER_ID": rank // local_world,
        "TPU_WORKER_HOSTNAMES": ",".join(["host", *[f"h{i}" for i in range(1, nodes)]]),
        "MASTER_PORT": 29511,
    }


LAUNCHERS = {
    "torchrun": _torchrun,
    "plain": _plain,
    "slurm": _slurm,
    "openmpi": _openmpi,
    "mpich": _mpich,
    "pjrt": _pjrt,
}
launchers = st.sampled_from(sorted(LAUNCHERS))
NUMBERS = {
    name
    for make in LAUNCHERS.values()
    for name, value in make(1, 2, 2).items()
    if isinstance(value, int) and name not in ("SLURM_STEP_ID", "SLURM_NNODES")
}
NEEDED = {
    "torchrun": ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"],
    "plain": ["RANK", "WORLD_SIZE", "MASTER_PORT"],
    "slurm": ["SLURM_NTASKS"],
    "openmpi": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    "mpich": ["PMI_RANK", "PMI_SIZE"],
    "pjrt": [],
}


def _env(launcher, place):
    return {name: str(value) for name, value in LAUNCHERS[launcher](*place).items()}


@given(launcher=launchers, place=places())
def test_every_launcher_reads_back(launcher, place):
    rank, local_world, nodes = place
    env = _env(launcher, place)
    before = dict(env)
    found = read_topology(env)
    assert env == before
    assert found == Topology(
        rank=rank,
        world_size=local_world * nodes,
        local_rank=rank % local_world,
        local_world_size=local_world,
        node_rank=rank // local_world,
        num_nodes=nodes,
        launcher=launcher,
        main_address="host01" if launcher == "slurm" else "host",
        main_port=29511,
        store_is_served=launcher == "torchrun",
    )


@given(launcher=launchers, place=places(), noise=st.dictionaries(st.text("QZ_"), st.text()))
def test_other_variables_do_not_matter(launcher, place, noise):
    env = _env(launcher, place)
    assert read_topology({**noise, **env}) == read_topology(env)


@given(data=st.data(), launcher=launchers, place=places())
def test_a_value_that_is_no_number_is_named(data, launcher, place):
    env = _env(launcher, place)
    name = data.draw(st.sampled_from(sorted(NUMBERS & env.keys())))
    env[name] = data.draw(st.sampled_from(["", "x", "-1", "1.5", "0x1", "1e3", "٣", "9" * 40]))
    with pytest.raises(fx.ContextError, match=name):
        read_topology(env)


@given(data=st.data(), place=places(), launcher=launchers)
def test_a_missing_variable_is_named(data, launcher, place):
    assume(NEEDED[launcher])
    env = _env(launcher, place)
    name = data.draw(st.sampled_from(NEEDED[launcher]))
    assume(name != "MASTER_ADDR" or place[2] > 1)
    del env[name]
    with pytest.raises(fx.ContextError, match=name):
        read_topology(env)


@given(launcher=launchers, place=places())
def test_a_rank_beyond_the_world_is_a_contradiction(launcher, place):
    assume(launcher != "pjrt")
    env = _env(launcher, place)
    name = next(n for n in env if n.endswith(("_RANK", "PROCID")) or n == "RANK")
    env[name] = str(place[1] * place[2])
    with pytest.raises(fx.ContextError, match=r"contradict|describes"):
        read_topology(env)


@given(launcher=launchers, place=places(), port=st.integers(65_536, 1 << 30))
def test_an_impossible_port_is_named(launcher, place, port):
    with pytest.raises(fx.ContextError, match="port"):
        read_topology({**_env(launcher, place), "MASTER_PORT": str(port)})


@given(env=st.dictionaries(st.sampled_from(sorted(NUMBERS | {"PJRT_DEVICE"})), st.text(max_size=4)))
def test_any_environment_is_a_topology_or_a_context_error(env):
    try:
        found = read_topology(env)
    except fx.ContextError as error:
        assert str(error)
    else:
        assert 0 <= found.rank < found.world_size


def test_an_sbatch_script_itself_is_no_rank():
    env = {name: "4" for name in ("SLURM_NTASKS", "SLURM_JOB_ID")} | {"SLURM_PROCID": "0"}
    assert read_topology(env) == Topology()


def test_torchrun_inside_slurm_is_torchrun():
    assert read_topology(_env("slurm", (1, 2, 1)) | _env("torchrun", (0, 2, 1))).launcher == (
        "torchrun"
    )
