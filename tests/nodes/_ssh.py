"""Programs `ssh` and `pdsh` for nodes: they start commands on other nodes, by their names.

As a module, this is the side of the host, which can enter every node. As a file it is the program
on a node: `ssh [OPTIONS] HOST COMMAND...`, or `pdsh -w HOST,HOST COMMAND...`. The two sides share a
socket in the lab's folder, which is one file system.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OWN_VALUE = ("-o", "-p", "-l", "-i", "-F", "-f", "-w")  # options with a value of their own
_BYTES = 1 << 17


@contextlib.contextmanager
def remote_shells(lab: Any) -> Iterator[str]:
    """Serve the programs; the folder in which nodes find them."""
    folder = lab.folder / "bin"
    folder.mkdir(exist_ok=True)
    program = shlex.join((sys.executable, "-I", "-S", __file__))
    for name in ("ssh", "pdsh"):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {program} "$0" "$@"\n')
        path.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(folder / "door"))
        door.listen()
        threading.Thread(target=_serve, args=(lab, door), daemon=True).start()
        try:
            yield str(folder)
        finally:
            (folder / "door").unlink()


def _serve(lab: Any, door: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            client = door.accept()[0]
            threading.Thread(target=_run, args=(lab, client), daemon=True).start()


def _run(lab: Any, client: socket.socket) -> None:
    """Run what a client asks for, until it ends or the client does."""
    order, files, _, _ = socket.recv_fds(client, _BYTES, 3)
    host, command = order.decode().split("\n", 1)
    node = next(node for node in lab.nodes if host in (node.name, node.address))
    with client, node.shell(command, files) as process:
        for file in files:
            os.close(file)
        threading.Thread(target=_end_with, args=(client, process), daemon=True).start()
        client.send(str(process.wait()).encode())


def _end_with(client: socket.socket, process: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):
        if not client.recv(1):
            process.send_signal(signal.SIGTERM)


def main() -> int:
    """Be `ssh` or `pdsh`."""
    name, words = Path(sys.argv[1]).name, sys.argv[2:]
    hosts = [words[words.index("-w") + 1]] if "-w" in words else []
    while words and words[0].startswith("-"):
        del words[: 2 if words[0] in _OWN_VALUE else 1]
    hosts = (hosts[0] if name == "pdsh" else words.pop(0)).split(",")
    clients = []
    for number, host in enumerate(hosts):
        command = " ".join(words)
        if name == "pdsh":
            command = command.replace("%n", str(number)).replace("%h", host)
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(str(Path(sys.argv[1]).with_name("door")))
        where = f"cd {shlex.quote(os.getcwd())} && "
        told = f"{host.rpartition('@')[2]}\n{where}{command}"
        socket.send_fds(client, [told.encode()], [0, 1, 2])
        clients.append(client)
    codes = [int(client.recv(_BYTES) or b"255") for client in clients]
    return next((128 - code if code < 0 else code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
