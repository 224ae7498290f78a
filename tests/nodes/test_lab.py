"""The lab itself: it leaves nothing, and does not change the machine on which it runs."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests._patience import wait_for
from tests.nodes._lab import ROOT, opened

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(60)]
OPEN = """
import json, sys, time
from pathlib import Path
from tests.nodes import _lab
with _lab.opened(Path(sys.argv[1]), 2) as lab:
    lab.nodes[0].process("-c", "import time; time.sleep(600)")
    print(json.dumps([node.init for node in lab.nodes] + [lab.switch]), flush=True)
    time.sleep(600)
"""


def _spaces(kind):
    """Namespaces that processes of this machine are in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(entry / "ns" / kind))
        except OSError:  # it has ended
            continue
    return found


def test_a_lab_has_made_its_mounts_when_it_opens(lab, folder):
    """What a test ends on a node is of an earlier test, and never a mount."""
    with opened(folder, 2) as other:
        for node in other.nodes:
            assert node.left() == {}
            assert "none /dev/shm tmpfs" in node.run("cat", "/proc/mounts")


def test_a_lab_whose_tests_are_killed_leaves_nothing(lab, folder):
    """No process, no network and no file; the interfaces of this machine are as before."""
    before = socket.if_nameindex()
    with subprocess.Popen(
        (sys.executable, "-c", OPEN, str(folder)),
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as tests:  # fmt: skip
        first = json.loads(tests.stdout.readline())
        networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in first}
        assert len(networks) == 3 and networks <= _spaces("net")
        assert socket.if_nameindex() == before
        tests.send_signal(signal.SIGKILL)
    wait_for(lambda: not networks & _spaces("net") and not folder.exists(), timeout_s=20)
    assert socket.if_nameindex() == before
    assert {os.readlink(f"/proc/{node.init}/ns/net") for node in lab.nodes} <= _spaces("net")
