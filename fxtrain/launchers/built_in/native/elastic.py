"""torch's elastic launcher: its command line for a spec, and running it in this process."""

import errno
import importlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import attrs

from fxtrain import _extensions
from fxtrain._addresses import is_local, listen
from fxtrain._secret import SECRET, fresh_secret
from fxtrain.errors import LaunchError
from fxtrain.launchers.child import SPARE
from fxtrain.launchers.launcher import (
    FORWARDED_SIGNALS,
    Launcher,
    forward_signals,
    signal_children,
)
from fxtrain.launchers.machine import Machine, cores_of_ranks
from fxtrain.launchers.orphans import MARK, end_strays, kept, mark_within
from fxtrain.launchers.outcome import LaunchResult
from fxtrain.launchers.program import rank_command, shared_environment
from fxtrain.launchers.spec import Invocation, LaunchSpec

LEAVE_THREAD = "fxtrain leave"  # the thread in which a launcher reports its end to other nodes
LEAVE_S = 10.0  # for other launchers to ask the store how the run has ended
_ONE_TRY_S = 5.0
_PAUSE_S = 0.5
_ON_CPU = ("node", "exclusive")
_SPARE_AFTER_S = 2.0  # after a rank, so that it starts alone
# Of torch's c10d rendezvous.
_OPTIONS = (
    "close_timeout", "heartbeat_timeout", "join_timeout", "keep_alive_interval",
    "keep_alive_max_attempt", "last_call_timeout",
)  # fmt: skip
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_Process = subprocess.Popen[str]
_STREAMS = {"none": "0", "out": "1", "err": "2", "both": "3"}


def native(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The command line of torchrun, which runs in this process so that torch is imported once.

    Raises:
        LaunchError: several nodes without a main address, an option that torch's rendezvous does
            not have, or a binding that needs GPUs.
    """
    if spec.nodes > 1 and not spec.main_address:
        raise LaunchError(
            f"{spec.nodes} nodes need an address to connect to. Set main_address to the host name "
            f"or address of node 0, the same on every node."
        )
    nodes = str(spec.nodes) if spec.min_nodes is None else f"{spec.min_nodes}:{spec.nodes}"
    program, *arguments = rank_command(spec, machine.python, cores=_cores(spec, machine))
    argv = [
        machine.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--nproc-per-node={spec.ranks}",
        *_rendezvous(spec, machine),
        f"--max-restarts={spec.restarts}",
        f"--monitor-interval={spec.monitor_interval_s:g}",
        f"--shutdown-timeout={spec.shutdown_s}",
        *_output(spec),
        *([f"--numa-binding={spec.bind}"] if spec.bind != "none" and not spec.cpu else []),
        "--no-python",
        program,
        # The elastic launcher replaces ${local_rank} in arguments; a user's $ must stay a $.
        *(word.replace("$", "$$") for word in arguments),
    ]
    # In torch 2.13, a launcher that serves the store of the ranks publishes its address only once,
    # so that a node that joins a later round waits for it in vain. Rank 0 does in every round.
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if spec.elastic else {}
    return Invocation(argv=argv, env=shared_environment(spec, machine) | store)


def _rendezvous(spec: LaunchSpec, machine: Machine) -> list[str]:
    """The address to which nodes connect.

    On one machine, the launcher serves the store on loopback, at a port that the system chooses
    unless one was requested, so that several launches do not collide.
    """
    alone = spec.nodes == 1
    host = "127.0.0.1" if alone else spec.main_address
    local = spec.local_address or ("127.0.0.1" if alone else machine.route.address)
    for setting in spec.rendezvous_options:
        name, _, value = setting.partition("=")
        if spec.nodes > 1 and not spec.elastic:
            raise LaunchError(
                f"LaunchSpec(rendezvous_options=[{setting!r}]): nodes with fixed numbers have "
                f"no options. Remove it, or set rendezvous to c10d."
            )
        if name not in _OPTIONS or not value.isdecimal() or not int(value):
            raise LaunchError(
                f"LaunchSpec(rendezvous_options=[{setting!r}]): pass one of {', '.join(_OPTIONS)}, "
                f"with a whole number above 0."
            )
    wait = math.ceil(spec.connect_timeout_s)
    settings = [f"timeout={wait}"]
    if spec.rendezvous_backend == "c10d":
        settings = [f"join_timeout={wait}", *spec.rendezvous_options]
    return [
        f"--rdzv-backend={spec.rendezvous_backend}",
        f"--rdzv-endpoint={host}:{spec.port}",
        f"--rdzv-id={spec.run_id or 'fxtrain'}",
        f"--rdzv-conf={','.join(settings)}",
        *([f"--node-rank={spec.node_rank}"] if spec.rendezvous_backend == "static" else []),
        *([f"--local-addr={local}"] if local else []),
    ]


def _output(spec: LaunchSpec) -> list[str]:
    words = [f"--role={spec.role}"] if spec.role != "default" else []
    words += [f"--log-dir={spec.log_dir}"] if spec.log_dir else []
    words += [f"--redirects={_STREAMS[spec.redirect]}"] if spec.redirect != "none" else []
    words += [f"--tee={_STREAMS[spec.tee]}"] if spec.tee != "none" else []
    shown = ",".join(map(str, spec.show_ranks))
    return words + ([f"--local-ranks-filter={shown}"] if shown else [])


def _cores(spec: LaunchSpec, machine: Machine) -> str:
    """Cores to which ranks on the CPU bind themselves; torch binds ranks with GPUs."""
    if spec.bind == "none" or not spec.cpu:
        return ""
    if spec.bind not in _ON_CPU:
        raise LaunchError(
            f"LaunchSpec(bind={spec.bind!r}, cpu=True): torch finds sockets and caches by the "
            f"nearest GPU. For ranks on the CPU, choose one of {', '.join(_ON_CPU)}."
        )
    shares = cores_of_ranks(spec.bind, spec.ranks, machine)
    return "/".join(",".join(map(str, share)) for share in shares)


def run_elastic(
    spec: LaunchSpec,
    invocation: Invocation,
    *,
    deadline: float | None = None,
    checks_devices: bool = True,
) -> LaunchResult:
    """Run the elastic launcher until all ranks of this machine have exited.

    At the deadline, on the monotonic clock, they are ended.

    Effects:
        Imports torch; adds the invocation's variables to those of this process, which the ranks
        inherit; starts the ranks, and ends their remaining children. Call it in the main thread,
        where signals arrive.

    Raises:
        LaunchError: the nodes could not connect, or there are fewer GPUs than ranks.
        OSError: the output folder cannot be created.
        TimeoutError: the ranks did not finish before the deadline.
    """
    os.environ.update(invocation.env)
    if spec.nodes == 1:  # no other machine to agree with
        os.environ.setdefault(SECRET, fresh_secret())
    # torch's C++ code warns of names without reverse DNS, and of closed connections at every end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[MARK] = mark_within(os.environ)
    for thread in threading.enumerate():
        if thread.name == LEAVE_THREAD:  # an earlier launch of this process may still use the port
            thread.join(LEAVE_S)
    listener = _open_rendezvous(spec)
    with listener or nullcontext():
        if spec.log_dir:
            Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
        # Importing torch takes seconds, so check file names and ports first.
        api = importlib.import_module("torch.distributed.run")
        if checks_devices:
            check_devices(spec)
        _quiet()
        with tempfile.TemporaryDirectory(prefix="fxtrain-launch-") as folder:
            stacks = Path(spec.log_dir or folder, _standing().FOLDER).absolute()
            os.environ.setdefault(_standing().STACKS, str(stacks))
            config, *command = _config(api, invocation.argv[3:], folder)
            agent = importlib.import_module("fxtrain.launchers.built_in.native.agent")
            ask = True
            with (
                kept(os.environ[MARK], patience_s=spec.shutdown_s),
                forward_signals(FORWARDED_SIGNALS, _forward),
            ):
                try:
                    with spares_kept(spec.spares) as replace_spares:
                        ending = agent.run_agent(
                            spec, config, *command, listener, deadline, replace_spares
                        )
                    ask = ending.code != 0
                finally:  # of ranks, which may still finish something after a success
                    end_strays(os.environ[MARK], patience_s=spec.shutdown_s, ask=ask)
            if ending.code and (text := _extensions.stacks.unreported(stacks)):
                sys.stderr.write(f"fxtrain launch: {text}\n")
    return ending


@contextmanager
def spares_kept(count: int) -> Iterator[Callable[[], None]]:
    """Within the block, keep so many spares for each rank that torch's agent starts.

    A rank takes seconds to import torch and the packages of its script, for which all ranks of a
    launch wait after a failure. A spare is started beside each rank by the same command. It imports
    the packages that the script imports, and waits; see `child.py`. torch's agent then gets its
    process in place of a new one.

    Yields a function that starts missing spares. The thread that starts the ranks calls it now and
    then, since Linux ends a child with the thread that has started it.

    Effects:
        torch's agent starts ranks by another function. Starts processes, and ends them.
    """
    handler: Any = importlib.import_module(_HANDLER).SubprocessHandler
    start = handler._popen
    waiting: dict[str, list[_Process]] = {}  # by the rank's number on this machine
    started: dict[str, tuple[float, Sequence[str], Mapping[str, str]]] = {}

    def start_rank(self: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        outputs = [file and file.name for file in (self._stdout, self._stderr)]
        started[env["LOCAL_RANK"]] = time.monotonic(), args, env
        spares = waiting.setdefault(env["LOCAL_RANK"], [])
        return _become(spares, env, outputs) or start(self, args, env)

    def replace() -> None:
        for rank, (since, args, env) in started.items():
            while time.monotonic() - since > _SPARE_AFTER_S and len(waiting[rank]) < count:
                # Without the mark by which what ranks leave behind is found and ended.
                variables = {key: value for key, value in env.items() if key != MARK}
                process = subprocess.Popen(
                    args,
                    env={**variables, SPARE: "1"},
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                    text=True,
                )
                waiting[rank].append(process)

    handler._popen = start_rank
    try:
        yield replace
    finally:
        handler._popen = start
        for spares in waiting.values():
            for process in spares:
                _end(process)


def _become(
    spares: list[_Process], env: Mapping[str, str], outputs: Sequence[str | None]
) -> _Process | None:
    """Have a spare become a rank; None if there is none that still waits."""
    while spares:
        process = spares.pop()
        with suppress(BrokenPipeError):  # it has ended meanwhile
            if process.poll() is None and process.stdin is not None:
                process.stdin.write(json.dumps({"env": dict(env), "outputs": outputs}))
                process.stdin.close()
                return process
        _end(process)
    return None


def _end(process: _Process) -> None:
    process.kill()
    with suppress(BrokenPipeError):
        process.communicate()


def _standing() -> Any:
    """Imports torch, so not before `run_elastic` has made its C++ code quiet."""
    return importlib.import_module("fxtrain.ops.standing")


def _forward(number: int) -> None:
    """Pass a signal on; SIGUSR2 also asks the ranks where they stand, and prints it."""
    signal_children(number)
    if number == signal.SIGUSR2:
        threading.Thread(target=_print_stacks, name="fxtrain-stacks", daemon=True).start()


def _print_stacks() -> None:
    try:
        stacks = _extensions.stacks
        text = stacks.describe_stacks(stacks.ask(Path(os.environ[_standing().STACKS])))
    except LaunchError as error:  # no rank has called fx.detect yet
        text = str(error)
    sys.stderr.write(f"fxtrain launch: {text}\n")
    sys.stderr.flush()


def _open_rendezvous(spec: LaunchSpec) -> socket.socket | None:
    """Listen at the main address, or check that it is reachable, before torch waits for it."""
    host = "127.0.0.1" if spec.nodes == 1 else spec.main_address.strip("[]")
    who = "This node" if spec.elastic else f"Node {spec.node_rank} of {spec.nodes}"
    listener = None
    # Where nodes join, whichever launcher comes first serves.
    if is_local(host) if spec.elastic else spec.node_rank == 0:
        try:
            listener = listen(host, spec.port)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            if not (spec.elastic and in_use):
                why = "is in use by another program" if in_use else f"fails: {error.strerror}"
                raise LaunchError(
                    f"Port {spec.port} of this machine {why}. Choose another main_port, the same "
                    f"on every node.",
                    code="FX701",
                ) from error
    hint = main_hint(spec)
    if listener is not None and not hint:
        return listener
    try:
        # At once where this process listens: the main address may be forwarded to this machine.
        timeout_s = spec.connect_timeout_s if listener is None else _PAUSE_S
        reach(host, spec.port, who=who, timeout_s=timeout_s, hint=hint)
    except LaunchError:
        if listener is not None:
            listener.close()
        raise
    return listener


def reach(address: str, port: int, *, who: str, timeout_s: float, hint: str = "") -> None:
    """Wait until a process listens at the main address, which may start later than this one.

    Effects:
        Opens connections, and closes the first successful one.

    Raises:
        LaunchError: none listens; the message has the number of attempts and the time.
    """
    start, tries, last = time.monotonic(), 0, ""
    while True:
        left = timeout_s - (time.monotonic() - start)
        tries += 1
        try:
            with socket.create_connection((address, port), max(0.1, min(left, _ONE_TRY_S))):
                return
        except OSError as error:
            last = _why(address, error)
        if time.monotonic() - start + _PAUSE_S >= timeout_s:
            raise LaunchError(
                f"{who} could not reach the main address {address}:{port} (attempts: {tries}, over "
                f"{time.monotonic() - start:.0f} s; last error: {last}). Check that node 0 was "
                f"started with the same main address and port, and that no firewall blocks it, or "
                f"allow more time with connect_timeout_s.{hint}",
                code="FX701",
            )
        time.sleep(_PAUSE_S)


def _why(address: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {address} could not be resolved ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "no answer"
    return "the connection failed: " + (error.strerror or str(error)).lower()


def main_hint(spec: LaunchSpec) -> str:
    """What is odd about a node 0 whose machine does not have the main address."""
    host = spec.main_address.strip("[]")
    if spec.nodes == 1 or spec.rendezvous_backend != "static" or spec.node_rank or is_local(host):
        return ""
    return (
        f" {host} is not an address of this machine: start node 0 on the machine that has "
        f"it, unless it is forwarded to this one."
    )


def check_devices(spec: LaunchSpec) -> None:
    """Check that each rank has an accelerator, if there are any."""
    if spec.cpu or spec.executable:
        return
    accelerator = importlib.import_module("torch").accelerator
    count = accelerator.device_count()
    if spec.gpus and count != len(spec.gpus):
        raise LaunchError(
            f"The GPUs {','.join(spec.gpus)} were chosen, but only {count} of them are usable on "
            f"this machine. Choose others, or run nvidia-smi."
        )
    if not spec.gpus and 0 < count < spec.ranks:
        kind = accelerator.current_accelerator()
        raise LaunchError(
            f"{spec.ranks} ranks were requested, but this machine has {count} {kind} devices. "
            f"Use {count} ranks, or compute on the CPU (cpu=True, --cpu)."
        )


def _config(api: Any, argv: Sequence[str], folder: str) -> tuple[Any, Any, list[Any]]:
    """Parse torch's command line, without an option that torch 2.9 does not know."""
    parser = api.get_args_parser()
    program = argv.index("--no-python")
    options = [*argv[:program]]
    if "--shutdown-timeout" not in parser._option_string_actions:
        options = [word for word in options if not word.startswith("--shutdown-timeout=")]
    if not any(word.startswith("--log-dir=") for word in options):
        options.append(f"--log-dir={folder}")
    try:
        return api.config_from_args(parser.parse_args([*options, *argv[program:]]))
    except (TypeError, ValueError) as error:
        raise LaunchError(f"torch's elastic launcher refused its settings: {error}") from error


def _quiet() -> None:
    """Silence the launcher's own messages about failing ranks: the result has what matters."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


NATIVE = Launcher(
    name="native",
    help="torch's elastic launcher, on one machine or on several that run the same command",
    invocation=native,
    run=run_elastic,
    uses=[field.name for field in attrs.fields(LaunchSpec)],
)
