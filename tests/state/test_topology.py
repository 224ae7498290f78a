"""Environments as launchers really leave them, and what is said of broken ones."""

import pytest

import fxtrain as fx
from fxtrain.state.topology import Topology, read_topology
from tests._errors import raises_code


def _slurm_step(**changes):
    """What `srun -N2 --ntasks-per-node=2 python train.py` leaves on rank 3."""
    env = {
        "SLURM_JOB_ID": "20071329",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "n[001-004]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "4",
        "SLURM_NODEID": "1",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": "n[002-003]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        **changes,
    }
    return {name: value for name, value in env.items() if value is not None}


def test_a_slurm_step_meets_on_its_own_first_node():
    assert read_topology(_slurm_step()) == Topology(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        launcher="slurm",
        main_address="n002",
        main_port=10_000 + 20071329 % 20_000,
    )


def test_the_allocation_does_not_count_where_the_step_speaks():
    """`srun --preserve-env` leaves the numbers of the whole job standing."""
    kept = {"SLURM_NTASKS": "32", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "8(x4)"}
    assert read_topology(_slurm_step(**kept)) == read_topology(_slurm_step())


def test_two_steps_of_a_job_have_two_ports():
    ports = {read_topology(_slurm_step(SLURM_STEP_ID=str(step))).main_port for step in range(4)}
    assert len(ports) == 4


STEP_ONLY = {
    name: None
    for name in _slurm_step()
    if "STEP" in name or name in ("SLURM_LOCALID", "SLURM_NODEID")
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({**STEP_ONLY, "SLURM_PROCID": "0"}, id="a batch script"),
        pytest.param({**STEP_ONLY, "SLURM_PROCID": None}, id="salloc without a step"),
        pytest.param(
            {
                "SLURM_JOB_NAME": "interactive",
                "SLURM_STEP_ID": "4294967290",
                "SLURM_STEPID": "4294967290",
                "SLURM_PROCID": "0",
                "SLURM_PTY_PORT": "34889",
            },
            id="salloc with an interactive step",
        ),
        pytest.param(
            {"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "34889"},
            id="srun -n4 --pty bash",
        ),
    ],
)
def test_what_srun_did_not_start_runs_alone(changes):
    assert read_topology(_slurm_step(**changes)) == Topology()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"SLURM_JOB_NAME": "interactive", "SLURM_PTY_PORT": "34889"},
            id="srun in a shell of salloc",
        ),
        pytest.param({"SLURM_JOB_NAME": "bash"}, id="srun bash train.sh"),
        pytest.param(
            {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "34889", "SLURM_STEP_ID": "1"},
            id="srun in a shell of srun",
        ),
    ],
)
def test_what_srun_started_from_a_shell_is_a_rank(changes):
    assert read_topology(_slurm_step(**changes)).rank == 3


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n[001-003,7],x1", "n001"),
        ("n7,n[1-2]", "n7"),
        ("rack[2,4]n[10-12]-ib,x", "rack2n10-ib"),
        ("10.0.0.7,10.0.0.8", "10.0.0.7"),
        ("gpu-a.example.org,b", "gpu-a.example.org"),
    ],
)
def test_the_first_host_of_a_short_form(nodes, host):
    assert read_topology(_slurm_step(SLURM_STEP_NODELIST=nodes)).main_address == host


@pytest.mark.parametrize("nodes", ["n[1-2", "[]", ",n1", "n]1[", "n[-2]", " "])
def test_a_host_list_that_is_none_is_named(nodes):
    with raises_code("FX101", "SLURM_STEP_NODELIST=", "MASTER_ADDR"):
        read_topology(_slurm_step(SLURM_STEP_NODELIST=nodes))
    known = _slurm_step(SLURM_STEP_NODELIST=nodes, MASTER_ADDR="here")
    assert read_topology(known).main_address == "here"


def test_one_node_meets_on_loopback():
    one = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}
    found = read_topology(_slurm_step(**one, SLURM_LOCALID="3"))
    assert (found.main_address, found.num_nodes) == ("127.0.0.1", 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_TASKS_PER_NODE": "2(x2)"},
        {"SLURM_TASKS_PER_NODE": "2,2"},
        {"SLURM_TASKS_PER_NODE": None, "SLURM_NTASKS_PER_NODE": "2"},
        {"SLURM_TASKS_PER_NODE": None},
    ],
)
def test_an_older_slurm_says_less_of_its_steps(changes):
    older = {name: None for name in _slurm_step() if "STEP_" in name} | {"SLURM_STEPID": "0"}
    found = read_topology(_slurm_step(**older, **changes))
    assert (found.local_world_size, found.num_nodes, found.main_address) == (2, 2, "n001")


@pytest.mark.parametrize("text", ["2(x3)", "2(x2),1", "2", "two", "2(2)", "0(x2)", "4", ""])
def test_tasks_that_do_not_add_up_are_named(text):
    with raises_code("FX101", "SLURM_STEP_TASKS_PER_NODE"):
        read_topology(_slurm_step(SLURM_STEP_TASKS_PER_NODE=text))


def test_a_step_of_srun_with_pmi_variables_is_slurms():
    """srun --mpi=pmi2 and Cray's plugin set an MPI's variables beside their own."""
    env = _slurm_step(PMI_RANK="3", PMI_SIZE="4", PALS_RANKID="3", PMI_JOBID="20071329.0")
    assert read_topology(env) == read_topology(_slurm_step())


@pytest.mark.parametrize("kind", ["PMI_{}", "OMPI_COMM_WORLD_{}"])
def test_mpirun_inside_a_slurm_job_is_an_mpis(kind):
    """mpirun has srun start one helper per node, and the ranks inherit its variables."""
    helper = _slurm_step(
        SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)"
    )
    own = {"RANK": "3", "SIZE": "4"} | {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    mpi = {kind.format(name): value for name, value in own.items()}
    found = read_topology({**helper, **mpi, "MASTER_ADDR": "n1", "MASTER_PORT": "1"})
    assert (found.rank, found.world_size, found.num_nodes) == (3, 4, 2)
    assert found.launcher in ("openmpi", "mpich")


def test_a_job_script_may_set_the_world_size_for_what_srun_starts():
    env = _slurm_step(WORLD_SIZE="4", MASTER_ADDR="n9", MASTER_PORT="4711")
    found = read_topology(env)
    assert (found.launcher, found.main_address, found.main_port) == ("slurm", "n9", 4711)
    with raises_code("FX101", "WORLD_SIZE=2", "4 ranks"):
        read_topology({**env, "WORLD_SIZE": "2"})


def test_running_alone_inside_a_step_takes_two_variables():
    found = read_topology(_slurm_step(RANK="0", WORLD_SIZE="1"))
    assert (found.launcher, found.world_size) == ("plain", 1)


def _plain(rank, world, **others):
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": "29500", **others}


def test_a_rank_without_a_local_rank_has_a_node_to_itself():
    """As Kubernetes starts them: one process per pod, and no LOCAL_RANK."""
    found = read_topology(_plain(2, 3, MASTER_ADDR="pod-0"))
    assert (found.local_rank, found.local_world_size) == (0, 1)
    assert (found.node_rank, found.num_nodes) == (2, 3)


def test_local_ranks_without_a_count_are_all_on_one_node():
    found = read_topology(_plain(1, 2, LOCAL_RANK="1"))
    assert (found.local_world_size, found.num_nodes, found.main_address) == (2, 1, "127.0.0.1")
    with raises_code("FX101", "LOCAL_WORLD_SIZE"):
        read_topology(_plain(2, 4, LOCAL_RANK="0"))


def test_deepspeed_and_ray_name_some_variables_otherwise():
    found = read_topology(
        _plain(3, 4, MASTER_ADDR="a", LOCAL_RANK="1", LOCAL_SIZE="2", CROSS_RANK="1")
    )
    assert (found.local_world_size, found.node_rank, found.num_nodes) == (2, 1, 2)


def test_hidden_local_ranks_of_torchrun_are_explained():
    env = _plain(3, 4, LOCAL_RANK="0", LOCAL_WORLD_SIZE="4", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    with raises_code("FX101"):
        read_topology({**env, "TORCHELASTIC_RUN_ID": "x"})


def test_one_rank_needs_no_place_to_meet():
    assert read_topology({"RANK": "0", "WORLD_SIZE": "1"}).main_port == 0
    assert read_topology({"PMI_RANK": "0", "PMI_SIZE": "1"}).world_size == 1


def test_mpirun_on_one_machine_needs_no_place_to_meet():
    def rank(of, size, **others):
        names = {"RANK": of, "SIZE": size, "LOCAL_RANK": of, "LOCAL_SIZE": size}
        env = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        return read_topology({**env, **others})

    first, second = rank(0, 2), rank(1, 2)
    assert (first.main_address, first.main_port) == (second.main_address, second.main_port)
    ports = {rank(0, 2, PMIX_NAMESPACE=f"prterun-host-{i}@1").main_port for i in range(9)}
    assert len(ports) == 9  # jobs on one machine do not meet
    assert ports == {rank(1, 2, PMIX_NAMESPACE=f"prterun-host-{i}@1").main_port for i in range(9)}


def test_nodes_of_unequal_size_are_never_one_node():
    """Three ranks on one node and one on another, which mpirun does not tell the ranks."""
    for rank, local, size in ((0, 0, 3), (2, 2, 3), (3, 0, 1)):
        names = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local, "LOCAL_SIZE": size}
        env = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        found = read_topology({**env, "MASTER_ADDR": "a", "MASTER_PORT": "1"})
        assert found.num_nodes > 1
        assert (found.node_rank == 0) == (size == 3)


def test_a_tpu_host_alone_and_among_others():
    assert read_topology({"PJRT_DEVICE": "TPU"}).world_size == 1
    alone = {"PJRT_DEVICE": "TPU", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    assert read_topology(alone).world_size == 1
    pod = {**alone, "TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_WORKER_ID": "2"}
    found = read_topology(pod)
    assert (found.rank, found.world_size, found.main_address) == (2, 4, "t0")
    with raises_code("FX101", "MEGASCALE_NUM_SLICES=2"):
        read_topology({**pod, "MEGASCALE_NUM_SLICES": "2"})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, r"WORLD_SIZE is not set, but RANK=0\. Set it"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "1"}, r"RANK is not set, but MASTER_PORT=1, WORLD_S"),
        (_plain("one", 2), r"RANK='one': expected a whole number from 0 to"),
        (_plain(0, 0), r"WORLD_SIZE='0': expected a whole number from 1"),
        (_plain(5, 2, LOCAL_RANK="1"), r"rank 5 of 2.*RANK=5, WORLD_SIZE=2\. Start"),
        (
            _plain(0, 2, MASTER_PORT="99999"),
            r"MASTER_PORT='99999': expected a whole number from 1 to 65535",
        ),
        (_plain(0, 2), r"2 ranks need MASTER_ADDR to connect\. Found .*Set the host name"),
        (_plain(0, 2, MASTER_ADDR=" "), r"need MASTER_ADDR to connect"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"MPI_LOCALRANKID or PMI_LOCAL_RANK or .* is not set"),
        ({"PALS_RANKID": "0"}, r"PMI_SIZE or MV2_COMM_WORLD_SIZE is not set, but PALS_RANKID=0"),
    ],
)
def test_messages_name_the_variables_what_was_found_and_what_to_do(env, words):
    with pytest.raises(fx.errors.ContextError, match=words):
        read_topology(env)
