"""Checkpoints in folders that machines share, and in folders that they do not."""

import re
import time

import pytest

from tests.nodes._lab import LAUNCH, SCRIPTS
from tests.nodes._rows import every_row_once

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(120)]


def _both(lab, *words):
    """A program on two nodes; what each wrote."""
    programs = [node.launch("--nodes=2", "--main-address=n0", *words) for node in lab.nodes[:2]]
    assert [program.finish() for program in programs] == [0, 0], programs[0].text
    return [program.text for program in programs]


def test_a_folder_of_each_machine_is_refused_before_the_commit(lab):
    """By the first save, on every rank, with nothing left behind."""
    for text in _both(lab, SCRIPTS / "save.py", "runs", "save", "latest"):
        assert "runs/update-0000000001 was not saved. Earlier checkpoints are intact." in text
        assert "is not the same folder on every machine: rank 0 on n0 does not see" in text
        assert "the files of rank 1 on n1. Use a folder on a file system that all" in text
        assert "latest is None" in text
    for node in lab.nodes[:2]:
        assert [*(node.disk / "runs").iterdir()] == []


def test_a_shared_folder_is_saved_and_restored(lab):
    for text in _both(lab, SCRIPTS / "save.py", lab.shared / "runs", "save", "restore"):
        assert "save done" in text and "restore done" in text


def test_an_object_store_of_each_process_is_refused_too(lab):
    """`memory://` is one, as is a store on each machine behind one name."""
    for text in _both(lab, SCRIPTS / "save.py", "memory://runs", "save", "latest"):
        assert "is not the same folder on every machine: rank 0 on n0 does not see" in text
        assert "latest is None" in text


def test_files_of_several_machines_in_one_export_need_a_shared_folder(lab):
    for text in _both(lab, SCRIPTS / "save.py", "model", "export sharded"):
        assert "rank 1 cannot see the folder that rank 0 created. Use a folder that all" in text
    assert [*lab.nodes[0].disk.glob("model/*")] == []
    for text in _both(lab, SCRIPTS / "save.py", lab.shared / "model", "export sharded"):
        assert "export sharded done" in text
    assert len([*(lab.shared / "model").glob("*.safetensors")]) == 2


def test_a_report_of_a_folder_of_each_machine_has_what_its_ranks_logged(lab):
    def reported(node, *words):
        program = node.start("-m", "fxtrain", "report", *words)
        return program.finish(), program.text

    first, second = lab.nodes[:2]
    _both(lab, SCRIPTS / "save.py", "main", "track")
    assert reported(first, "main")[0] == 0
    assert '"loss"' in (first.disk / "report.html").read_text()
    code, text = reported(second, "main")
    assert code == 2 and "main: no such folder" in text
    _both(lab, SCRIPTS / "save.py", "all", "track all")
    assert reported(first, "all")[0] == 0
    code, text = reported(second, "all")
    assert code == 2 and "Pass the runs in this folder: rank1" in text
    assert reported(second, "all/rank1")[0] == 0
    assert '"loss"' in (second.disk / "report.html").read_text()


@pytest.mark.slow
def test_a_lock_of_a_machine_that_lost_its_power_is_waited_for_and_taken_over(lab):
    """A run that continues on other machines says for whose lock it waits."""
    words = (SCRIPTS / "train.py", "--folder", lab.shared / "runs", "--sleep", "0.3")
    first = lab.nodes[0].launch("--nodes=1", *words)
    first.wait_for("update 6.")
    lab.nodes[0].power_off()
    start = time.monotonic()
    again = lab.nodes[1].start(*LAUNCH, *words)
    again.wait_for("for a sign that it is alive", 30)
    assert re.search(
        rf"{lab.shared}/runs has a lock of process \d+ on n0: waiting up to 20 s for a sign that",
        again.text,
    )
    again.wait_for("continues after update", 30)
    assert time.monotonic() - start > 20
    assert again.finish() == 0, again.text
    every_row_once(lab, 240)


@pytest.mark.parametrize("action", ["export", "track"])
def test_what_only_rank_0_writes_may_be_in_a_folder_of_each_machine(lab, action):
    for _ in range(2):  # over a model that is there, and to continue a tracked run
        for text in _both(lab, SCRIPTS / "save.py", "runs", action):
            assert f"{action} done" in text
    assert [*(lab.nodes[0].disk / "runs").iterdir()] != []
    assert [*lab.nodes[1].disk.glob("runs/*")] == []


def test_a_run_with_damaged_checkpoints_only_does_not_begin_again(lab):
    _both(lab, SCRIPTS / "save.py", lab.shared / "runs", "save")
    (lab.shared / "runs/update-0000000001/rank-00001.safetensors").unlink()
    programs = [
        node.launch(
            *("--nodes=2", "--main-address=n0", SCRIPTS / "train.py"),
            *("--folder", lab.shared / "runs"),
        )
        for node in lab.nodes[:2]
    ]
    assert [program.finish() for program in programs] == [1, 1]
    assert "is complete:" in programs[0].text and "rank-00001.safetensors" in programs[0].text
    assert not any("update 1." in program.text for program in programs)
