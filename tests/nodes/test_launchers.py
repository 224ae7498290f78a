"""Launchers that start ranks on other machines by themselves, and the other ways to launch."""

import importlib.util
import os
import shutil
import sys

import pytest

from tests.nodes._lab import SCRIPTS
from tests.nodes._ssh import remote_shells

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(200)]
SLOW = pytest.mark.slow
MEET = SCRIPTS / "meet.py"
LAUNCH = ("-m", "fxtrain", "launch", "--cpu")
MPI_NETWORK = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include")


@pytest.fixture
def shells(lab):
    """Variables with which a node finds `ssh` and `pdsh`, and a hostfile of two nodes."""
    (lab.shared / "hosts.txt").write_text("n0 slots=1\nn1 slots=1\n")
    with remote_shells(lab) as folder:
        yield {"PATH": f"{folder}:{lab.variables['PATH']}"}


def _met(program, timeout_s=100, orders=(("n0", "n1"),)):
    assert program.finish(timeout_s) == 0, program.text
    # A rank on another machine writes for itself, and MPI passes on what it writes.
    assert program.text.count("total 3") == 2, program.text
    assert any(f"[('{a}', 0, 0), ('{b}', 0, 1)]" in program.text for a, b in orders)


def test_open_mpi_starts_ranks_on_both_machines(lab, shells):
    program = next(filter(shutil.which, ("mpirun.openmpi", "mpirun")), None)
    if program is None:
        pytest.skip("Open MPI is not installed (apt-get install openmpi-bin)")
    options = (f"program={program}", "kind=openmpi", f"hostfile={lab.shared / 'hosts.txt'}")
    _met(
        lab.nodes[0].start(
            *(*LAUNCH, "--launcher=mpi", "--nodes=2", "--ranks=1", "--main-address=n0"),
            *(word for option in options for word in ("-o", option)),
            *("--env", "PYTHONPATH", MEET),
            env={**shells, **dict.fromkeys(MPI_NETWORK, "eth0")},
        )
    )


def test_deepspeed_starts_ranks_on_both_machines(lab, shells):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    if " " in sys.executable:
        pytest.skip("DeepSpeed's runner takes no Python in a folder with a space")
    _met(
        lab.nodes[0].start(
            *(*LAUNCH, "--launcher=deepspeed", "-o", f"hostfile={lab.shared / 'hosts.txt'}"),
            *("--main-address=n0", "--env", "PYTHONPATH", "--env", "OMP_NUM_THREADS", MEET),
            env=shells,
        )
    )


@SLOW
def test_ray_starts_ranks_on_both_machines(lab):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    paths = [lab.variables["PYTHONPATH"], *(path for path in sys.path if path)]
    lab.variables_of_run["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    lab.variables_of_run["RAY_TMPDIR"] = "/dev/shm/ray"
    start = ("-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2")
    size = ("--object-store-memory=100000000", "--include-dashboard=false")
    head = lab.nodes[0].start(*start, "--head", f"--node-ip-address={lab.address(0)}", *size)
    head.wait_for("Ray runtime started", 90)
    other = (f"--address={lab.address(0)}:6379", f"--node-ip-address={lab.address(1)}")
    worker = lab.nodes[1].start(*start, *other, size[0])
    worker.wait_for("Ray runtime started", 90)
    _met(
        lab.nodes[0].start(
            *LAUNCH, "--launcher=ray", "--nodes=2", "--ranks=1", "-o", "address=auto", MEET
        ),
        150,
        orders=(("n0", "n1"), ("n1", "n0")),  # Ray chooses
    )


@pytest.mark.parametrize("hosts", ["debian", pytest.param("good", marks=SLOW)])
def test_a_function_runs_on_both_machines(lab, hosts):
    lab.hosts(hosts)
    programs = [node.start(SCRIPTS / "function.py", node.number, "n0") for node in lab.nodes[:2]]
    assert [program.finish(90) for program in programs] == [0, 0], programs[0].text
    for number, program in enumerate(programs):
        assert f"[('n{number}', {number}, 3.0)]" in program.text


@pytest.mark.parametrize("hosts", [pytest.param("good", marks=SLOW), "debian"])
def test_fxtrain_test_passes_on_both_machines(lab, hosts):
    lab.hosts(hosts)
    programs = [
        node.start(
            *("-m", "fxtrain", "test", "-n", "1", "--set", "launch.nodes=2"),
            *("--set", f"launch.node_rank={node.number}", "--set", "launch.main_address=n0"),
            *("--set", "launch.cpu=true"),
        )
        for node in lab.nodes[:2]
    ]
    assert [program.finish(120) for program in programs] == [0, 0], programs[0].text
