"""Machines on this machine: namespaces with their own network, processes, host name and disk.

Nodes are joined by a bridge that lives in a namespace of its own, so no interface of the host is
touched. Namespaces have no names: they exist as long as their first process, which the kernel kills
with the process that made the lab, however that one ends; its files go a second later.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from tests._patience import patience

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
RELAY = Path(__file__).with_name("_relay.py")
CLOCK = Path(__file__).with_name("clock.c")
LAUNCH = ("-m", "fxtrain", "launch", "--cpu")
# The first process of a node ends what nobody waits for, as every first process does.
_INIT = "import os, time\nwhile True:\n try: os.wait()\n except ChildProcessError: time.sleep(0.1)"
_POLL_S = 0.02
IPV6 = "fd91:7::"


def problem() -> str:
    """Why there can be no lab here; empty if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines made of namespaces need Linux and root"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"machines made of namespaces need {program} (iproute2, util-linux)"
    bridge = ("ip", "link", "add", "br0", "type", "bridge")
    made = subprocess.run(
        ("unshare", "--net", "--mount", "--pid", "--fork", *bridge),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no namespaces with bridges here: {made.stderr.strip()}" if made.returncode else ""


@attrs.define(eq=False)
class Program:
    """A Python program on a node: its lines with the time of each, and its exit code."""

    node: "Node"
    number: int
    pid: int
    started: float = attrs.field(factory=time.monotonic)

    @property
    def text(self) -> str:
        """What it has written so far, on both streams."""
        return self.node.output(self.number).read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        path = self.node.output(self.number).with_suffix(".code")
        return int(path.read_text()) if path.exists() else None

    def wait_for(self, words: str, timeout_s: float = 60.0) -> float:
        """Wait until it has written some words; the time at which they were seen."""
        deadline = time.monotonic() + timeout_s * patience()
        while words not in self.text:
            if self.code is not None or time.monotonic() > deadline:
                raise AssertionError(f"never wrote {words!r} (code {self.code}):\n{self.text}")
            time.sleep(_POLL_S)
        return time.monotonic()

    def finish(self, timeout_s: float = 60.0) -> int:
        """Wait for its end; its exit code."""
        deadline = time.monotonic() + timeout_s * patience()
        while (code := self.code) is None:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"n{self.node.number} still runs after {timeout_s:.0f} s:\n{self.text}\n"
                    f"{self.node.stacks()}"
                )
            time.sleep(_POLL_S)
        return code

    def rank(self, number: int) -> int:
        """The process of a rank of scripts/train.py, by its number on the node."""
        lines = [line for line in self.text.splitlines() if f"rank {number} ready" in line]
        return int(lines[-1].split()[-1])

    def send_signal(self, number: int) -> None:
        self.node.send_signal(self.pid, number)


@attrs.define(eq=False)
class Node:
    """One machine."""

    lab: "Lab"
    number: int
    init: int  # the first process, by its number outside
    programs: int = 0
    server: subprocess.Popen | None = None
    clock: dict[str, str] = attrs.field(factory=dict)  # variables of a wrong one
    _server_pid: int = 0  # by its number on the node; 0 until it has loaded torch

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def address(self) -> str:
        return self.lab.address(self.number)

    @property
    def disk(self) -> Path:
        """The files that are this node's own, which all nodes call `Lab.own`."""
        return self.lab.folder / self.name

    def output(self, number: int) -> Path:
        return self.disk / f"program-{number}.out"

    def start(self, *words: str | Path, env: Mapping[str, str] | None = None) -> Program:
        """Start `python WORDS` in the node's own folder, with torch loaded."""
        self.serve()
        self.wait_for_server()
        self.programs += 1
        variables = {**self.lab.variables, **self.lab.variables_of_run, **self.clock, **(env or {})}
        order = {
            "words": [str(word) for word in words],
            "env": variables,
            "cwd": str(self.lab.own),
            "output": str(self.lab.own / self.output(self.programs).name),
        }
        assert self.server.stdin is not None and self.server.stdout is not None
        self.output(self.programs).touch()
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        pid = int(self.server.stdout.readline())
        return Program(node=self, number=self.programs, pid=pid)

    def process(self, *words: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen:
        """Start `python WORDS` as a process that loads torch itself, with its output in a pipe."""
        return subprocess.Popen(
            (*self._enter(), sys.executable, *map(str, words)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**self.lab.variables, **(env or {})},
        )  # fmt: skip

    def launch(self, *words: str | Path, env: Mapping[str, str] | None = None) -> Program:
        """Start `fxtrain launch --cpu` with this node's number."""
        return self.start(*LAUNCH, f"--node-rank={self.number}", *words, env=env)

    def set_clock(self, offset_s: int) -> None:
        """Make the time of day of programs that start from now on wrong."""
        self.close()
        library = self.lab.folder / "clock.so"
        if not library.exists():
            _well("cc", "-shared", "-fPIC", "-o", str(library), str(CLOCK))
        self.clock = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_S": str(offset_s)}

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """Run any program on the node; what it wrote."""
        done = subprocess.run(
            (*self._enter(), *command),
            capture_output=True, text=True, check=True, timeout=timeout_s * patience(),
        )  # fmt: skip
        return done.stdout

    def shell(self, command: str, files: list[int]) -> subprocess.Popen:
        """A shell command as a remote shell would start it, with these files as its streams."""
        return subprocess.Popen(
            (*self._enter(), "sh", "-c", command),
            stdin=files[0], stdout=files[1], stderr=files[2], start_new_session=True,
            env={name: self.lab.variables[name] for name in ("PATH", "HOME", "TMPDIR", "LANG")},
        )  # fmt: skip

    def link(self, state: str, *, second: bool = False) -> None:
        """Set the cable to "up" or "down"."""
        self.run("ip", "link", "set", "aaa0" if second else "eth0", state)

    def cut(self) -> None:
        """Pull the cable: no packet and no reset arrives."""
        self.link("down")

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def kill_all(self) -> None:
        """Kill every process at once, as an operating system that restarts."""
        self._signal_all(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the server of forks."""
        if self.server is not None:
            with self.server:
                self.server.kill()
            self.server = None

    def power_off(self) -> None:
        """The others see nothing, not even a closed connection."""
        self.cut()
        self.kill_all()

    def processes(self) -> dict[int, str]:
        """Numbers, as seen outside, and command lines of the node's processes."""
        space = os.readlink(f"/proc/{self.init}/ns/pid")
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") == space and int(entry.name) != self.init:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words:  # a zombie has none
                        found[int(entry.name)] = words.strip()
        return found

    def left(self) -> dict[int, str]:
        """Processes other than the server of forks, as `processes` has them."""
        server = self._outside().get(self.wait_for_server()) if self.server else None
        return {number: words for number, words in self.processes().items() if number != server}

    def stacks(self) -> str:
        """Where processes stand that have installed faulthandler; ends them."""
        self._signal_all(signal.SIGABRT)
        time.sleep(1)
        return self.output(self.programs).read_text(errors="replace")[-4000:]

    def send_signal(self, pid: int, number: int) -> None:
        """Send a signal to a process by its number on the node."""
        os.kill(self._outside()[pid], number)

    def reset(self) -> None:
        """No programs, no files, a working network."""
        self.thaw()
        if self.clock:
            self.close()
            self.clock = {}
        for number in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.link("up")
        # Numbers of programs go on: the server may still write the end of one of the test before.
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def serve(self) -> None:
        """Start to load torch, if that is not done: it takes long on a busy machine."""
        if self.server is not None and self.server.poll() is None:
            return
        self.server = subprocess.Popen(
            (*self._enter(), sys.executable, "-m", "tests.nodes._server"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            # torch reads it when it is loaded; launchers set it for the programs that they start.
            env={**self.lab.variables, **self.clock, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )  # fmt: skip
        self._server_pid = 0

    def wait_for_server(self) -> int:
        """Wait until the server has loaded torch; its number on the node."""
        if not self._server_pid:
            assert self.server is not None and self.server.stdout is not None
            line = self.server.stdout.readline()
            assert line, f"the server of {self.name} ended with {self.server.wait()}"
            self._server_pid = int(line)
        return self._server_pid

    def _outside(self) -> dict[int, int]:
        """By the number of a process on the node, its number outside."""
        found: dict[int, int] = {}
        for number in self.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{number}/status").read_text()
                line = next(row for row in status.splitlines() if row.startswith("NSpid:"))
                found[int(line.split()[-1])] = number
        return found

    def _signal_all(self, number: int) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _enter(self) -> tuple[str, ...]:
        return ("nsenter", f"--target={self.init}", "-m", "-u", "-n", "-p", "-i", "--wdns=/")


@attrs.define(eq=False)
class Lab:
    """Nodes, and the switch that joins them.

    Attributes:
        folder: Files of the lab on the host.
        network: The first three numbers of addresses.
        nodes: The machines.
        switch: The process whose network namespace has the bridges.
        second: The first three numbers of addresses in the second network.
        started: The first processes.
        variables_of_run: Variables for the programs of a test.
    """

    folder: Path
    network: str
    nodes: list[Node] = attrs.field(factory=list)
    switch: int = 0
    second: str = ""
    started: list[subprocess.Popen] = attrs.field(factory=list)
    variables_of_run: dict[str, str] = attrs.field(factory=dict)

    @property
    def own(self) -> Path:
        """Where each node has its own files."""
        return self.folder / "own"

    @property
    def shared(self) -> Path:
        """A folder that all nodes share."""
        return self.folder / "shared"

    @property
    def variables(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.own),
            "TMPDIR": str(self.own),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "TEST_PATIENCE": str(patience()),
            "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
        }

    def address(self, number: int) -> str:
        return f"{self.network}.{10 + number}"

    def hosts(self, kind: str) -> None:
        """What /etc/hosts of the nodes has: "good", "debian", "none", "wrong", "second" or "ipv6".

        "wrong" is an address that nobody has, for a node's own name; "second" are the addresses of
        the second network, "ipv6" those of version 6.
        """
        lines = {n.number: f"{n.address} {n.name}" for n in self.nodes}
        for node in self.nodes:
            others = [text for number, text in lines.items() if number != node.number]
            text = {
                "good": [*lines.values()],
                "debian": [f"127.0.1.1 {node.name}", *others],
                "none": [],
                "wrong": [f"{self.network}.99 {node.name}", *others],
                "second": [f"{self.second}.{10 + n.number} {n.name}" for n in self.nodes],
                "ipv6": [f"{IPV6}{10 + n.number} {n.name}" for n in self.nodes],
            }[kind]
            # In place: the file is mounted.
            (self.folder / f"{node.name}.hosts").write_text(
                "\n".join(["127.0.0.1 localhost", *text, ""])
            )

    @contextlib.contextmanager
    def second_network(self, network: str) -> Iterator[None]:
        """Give every node another interface, whose name sorts before the first one's."""
        self.second = network
        for node in self.nodes:
            self._cable(node, "aaa0", f"q{node.number}", "br1", f"{network}.{10 + node.number}/24")
        try:
            yield
        finally:
            for node in self.nodes:
                node.run("ip", "link", "delete", "aaa0")

    @contextlib.contextmanager
    def slow_network(self, delay_s: float, loss: float = 0.0) -> Iterator[None]:
        """Delay packets that nodes send, and lose a part of them."""
        pairs = [(f"p{node.number}", f"r{node.number}") for node in self.nodes]
        for port, relay in pairs:
            self._switch("ip", "link", "set", port, "nomaster")
            self._switch("ip", "link", "add", relay, "type", "veth", "peer", "name", f"{relay}b")
            self._switch("ip", "link", "set", f"{relay}b", "master", "br0", "up")
            self._switch("ip", "link", "set", relay, "up")
        names = [name for pair in pairs for name in pair]
        words = (sys.executable, "-I", RELAY, str(delay_s), str(loss), *names)
        with subprocess.Popen((*self._on_switch, *words), stdout=subprocess.PIPE) as relay:
            try:
                assert relay.stdout is not None and relay.stdout.readline() == b"ready\n"
                yield
            finally:
                relay.kill()
                for port, name in pairs:
                    self._switch("ip", "link", "delete", name)
                    self._switch("ip", "link", "set", port, "master", "br0")

    @contextlib.contextmanager
    def only_ipv6(self) -> Iterator[None]:
        """Take the addresses of version 4 away, and name nodes by those of version 6."""
        for node in self.nodes:
            node.run("ip", "address", "flush", "dev", "eth0")
            address = f"{IPV6}{10 + node.number}/64"
            node.run("ip", "address", "add", address, "dev", "eth0", "nodad")
        self.hosts("ipv6")
        try:
            yield
        finally:
            for node in self.nodes:
                node.run("ip", "address", "flush", "dev", "eth0")
                node.run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")

    @contextlib.contextmanager
    def without_ipv6(self) -> Iterator[None]:
        """Switch version 6 off, as many clusters do."""
        setting = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
        for node in self.nodes:
            node.run("sh", "-c", f"echo 1 > {setting}")
        try:
            yield
        finally:
            for node in self.nodes:
                node.run("sh", "-c", f"echo 0 > {setting}")

    def split(self, *numbers: int) -> None:
        """Part the network: these nodes reach each other, and no others; no cable is down."""
        for number in numbers:
            self._switch("ip", "link", "set", f"p{number}", "master", "br2")

    def heal(self) -> None:
        """Undo `split`."""
        for node in self.nodes:
            self._switch("ip", "link", "set", f"p{node.number}", "master", "br0")

    def reset(self) -> None:
        """As new: see `Node.reset`. All nodes load torch at the same time."""
        self.variables_of_run.clear()
        self.heal()
        for node in self.nodes:
            node.reset()
        for path in self.shared.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.hosts("good")
        for node in self.nodes:
            node.serve()
        for node in self.nodes:  # so that the program of one does not wait while another loads it
            node.wait_for_server()

    def close(self) -> None:
        for node in self.nodes:
            node.close()
        for process in reversed(self.started):
            process.kill()
            process.wait(10)
            if process.stdin is not None:
                process.stdin.close()

    def open(self, count: int) -> None:
        # Its input ends with this process, however that ends.
        words = ("sh", "-c", 'read line; sleep 1; rm -rf "$0"', str(self.folder))
        self.started.append(subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True))
        for path in (self.own, self.shared):
            path.mkdir(parents=True)
        self.switch = self._first_process("switch", "", "sleep infinity")
        for bridge in ("br0", "br1", "br2"):
            self._switch("ip", "link", "add", bridge, "type", "bridge")
            self._switch("ip", "link", "set", bridge, "up")
        for number in range(count):
            name = f"n{number}"
            (self.folder / name).mkdir()
            for file, text in ((f"{name}.hosts", ""), (f"{name}.name", name), ("resolv", "")):
                (self.folder / file).write_text(text)
            mounts = _MOUNTS.format(name=name, folder=self.folder)
            program = shlex.join((sys.executable, "-I", "-c", _INIT))
            init = self._first_process(name, mounts, program)
            node = Node(lab=self, number=number, init=init)
            self.nodes.append(node)
            node.run("ip", "link", "set", "lo", "up")
            self._cable(node, "eth0", f"p{number}", "br0", f"{node.address}/24")
        self.hosts("good")

    def _cable(self, node: Node, link: str, port: str, bridge: str, address: str) -> None:
        self._switch(
            *("ip", "link", "add", link, "netns", str(node.init), "type", "veth"),
            *("peer", "name", port),
        )
        self._switch("ip", "link", "set", port, "master", bridge, "up")
        node.run("ip", "address", "add", address, "dev", link)
        node.run("ip", "link", "set", link, "up")

    @property
    def _on_switch(self) -> tuple[str, ...]:
        return ("nsenter", f"--target={self.switch}", "-n")

    def _switch(self, *words: str) -> None:
        _well(*self._on_switch, *words)

    def _first_process(self, name: str, commands: str, program: str) -> int:
        """The first process of new namespaces, once commands have run there; its number outside."""
        ready = self.folder / f"{name}.ready"
        process = subprocess.Popen(
            (
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--mount-proc"),
                *("--fork", "--kill-child=KILL", "sh", "-ec"),
                f"{commands}\ntouch {ready}\nexec {program}",
            ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        deadline = time.monotonic() + 20 * patience()
        while time.monotonic() < deadline:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if children and ready.exists():
                return int(children[0])
            assert process.poll() is None, f"{name} ended with {process.returncode}"
            time.sleep(_POLL_S)
        raise AssertionError(f"{name} did not start")


_MOUNTS = """
hostname {name}
mount --make-rprivate /
mount --bind {folder}/{name} {folder}/own
mount --bind {folder}/{name}.hosts /etc/hosts
mount --bind {folder}/{name}.name /etc/hostname
mount --bind {folder}/resolv "$(readlink -f /etc/resolv.conf)" || true
mount -t tmpfs none /dev/shm
"""


def _well(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"


@contextlib.contextmanager
def opened(folder: Path, count: int = 3, network: str = "10.91.7") -> Iterator[Lab]:
    """A lab, and its end."""
    lab = Lab(folder=folder, network=network)
    try:
        lab.open(count)
        yield lab
    finally:
        lab.close()


def later(wait_s: float, action) -> threading.Timer:
    """Run something after a time, beside the test."""
    timer = threading.Timer(wait_s, action)
    timer.daemon = True
    timer.start()
    return timer
