"""At which addresses processes listen, as Linux tells."""

import os
import socket
import struct
from pathlib import Path

__all__ = ["addresses_of"]

_LISTENS = "0A"


def addresses_of(pid: int) -> list[str]:
    """The addresses at which a process listens for TCP connections, sorted."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == _LISTENS and f"socket:[{words[9]}]" in inodes:
                found.append(_address(words[1].partition(":")[0], family))
    return sorted(found)


def _address(text: str, family: int) -> str:
    # Words of 32 bits, each in the order of this machine.
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
