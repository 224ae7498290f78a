"""Names, addresses and networks by which machines find each other."""

import time

import pytest

from tests._patience import patience
from tests.nodes._lab import SCRIPTS

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(150)]
MEET = SCRIPTS / "meet.py"


def _launcher(lab, number, main="n0", stay_s=0):
    return lab.nodes[number].launch("--nodes=2", f"--main-address={main}", MEET, stay_s)


def _torchrun(lab, number, main="n0"):
    return lab.nodes[number].start(
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *(f"--node-rank={number}", f"--master-addr={main}", MEET),
    )


def _plain(lab, number, main="n0", stay_s=0):
    variables = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": main, "MASTER_PORT": 29511}
    return lab.nodes[number].start(MEET, stay_s, env={k: str(v) for k, v in variables.items()})


def _slurm(lab, number, main="n0"):
    variables = {"SLURM_PROCID": number, "SLURM_NTASKS": 2, "SLURM_LOCALID": 0, "SLURM_JOB_ID": 7}
    variables |= {"SLURM_NODEID": number, "SLURM_NNODES": 2, "SLURM_NTASKS_PER_NODE": 1}
    variables |= {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NODELIST": "n[0-1]"}
    variables |= {"SLURM_JOB_NODELIST": "n[0-1]", "SLURM_STEP_ID": 0, "MASTER_ADDR": main}
    variables |= {"SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    return lab.nodes[number].start(MEET, env={k: str(v) for k, v in variables.items()})


WAYS = {"launcher": _launcher, "torchrun": _torchrun, "plain": _plain, "slurm": _slurm}


def _met(lab, way, main="n0"):
    programs = [WAYS[way](lab, number, main) for number in (0, 1)]
    codes = [program.finish(60) for program in programs]
    texts = [program.text for program in programs]
    assert codes == [0, 0], "\n".join(texts)
    assert all("total 3" in text for text in texts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", ["good", "debian"])
def test_machines_meet_by_the_main_name(lab, way, hosts):
    lab.hosts(hosts)
    _met(lab, way)


@pytest.mark.parametrize("way", WAYS)
def test_addresses_may_sort_after_loopback(high_lab, way):
    """gloo sorts the ends of a connection by their addresses."""
    high_lab.hosts("debian")
    _met(high_lab, way)


def test_a_name_that_leads_elsewhere_is_not_used(lab):
    """Of the machine itself, in its /etc/hosts; the main address is written as a number."""
    lab.hosts("wrong")
    programs = [
        node.launch("--nodes=2", f"--main-address={lab.address(0)}", MEET) for node in lab.nodes[:2]
    ]
    assert [program.finish(60) for program in programs] == [0, 0], programs[0].text


@pytest.mark.parametrize("way", ["launcher", "plain"])
def test_gloo_uses_the_network_of_the_main_address(lab, way):
    """Not that of the host names, whose cables are cut."""
    with lab.second_network("10.91.8"):
        lab.hosts("second")
        for node in lab.nodes:
            node.link("down", second=True)
        _met(lab, way, main=lab.address(0))


@pytest.mark.parametrize(
    ("way", "hosts"),
    [
        ("launcher", "debian"),
        ("plain", "good"),
        pytest.param("launcher", "good", marks=pytest.mark.slow),
        pytest.param("plain", "debian", marks=pytest.mark.slow),
    ],
)
def test_sockets_listen_where_the_page_on_security_says(lab, way, hosts):
    """At the address towards the other machine; the store on all, if its name is of loopback."""
    lab.hosts(hosts)
    programs = [WAYS[way](lab, number, stay_s=5) for number in (0, 1)]
    for number, program in enumerate(programs):
        program.wait_for(f"rank {number} met")
    for node in lab.nodes[:2]:
        rows = [line.split() for line in node.run("ss", "-Htln").splitlines()]
        places = {row[3].rpartition(":")[0] for row in rows}
        everywhere = {"*"} if hosts == "debian" and not node.number else set()
        assert places == {node.address} | everywhere, rows
    assert [program.finish() for program in programs] == [0, 0]


@pytest.mark.parametrize("cut", [0, 1])
def test_a_machine_that_ranks_do_not_reach_is_named_in_time(lab, cut):
    """gloo of node 0 is told a network that one of the machines is not on."""
    with lab.second_network("10.91.6"):
        lab.nodes[cut].link("down", second=True)
        programs = [
            lab.nodes[number].launch(
                *("--nodes=2", f"--main-address={lab.address(0)}", MEET),
                env={"WAIT_S": "5", **({"GLOO_SOCKET_IFNAME": "aaa0"} if not number else {})},
            )
            for number in (0, 1)
        ]
        start = time.monotonic()
        assert [program.finish(40) for program in programs] == [1, 1]
        # gloo itself waits five times as long; the launcher of the store stays for a moment.
        assert time.monotonic() - start < 5 + (2 + 8) * patience()
    assert "Rank 1 of 2 did not reach rank 0 on n0 at 10.91.6.10 (" in programs[1].text
    assert "rank 1 on n1: " in programs[0].text and "It does not reach rank 0" in programs[0].text
