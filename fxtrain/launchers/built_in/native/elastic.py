"""Runs torch's elastic launcher in this process, which starts the ranks."""

import errno
import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from fxtrain._addresses import listen
from fxtrain._secret import SECRET, derive_key, fresh_secret, key_proof
from fxtrain.errors import LaunchError
from fxtrain.launchers.built_in.native.network import (
    FAREWELL,
    FAREWELL_S,
    is_local,
    reach,
    serve,
    serve_nodes,
)
from fxtrain.launchers.built_in.native.spares import spares_kept
from fxtrain.launchers.orphans import MARK, end_strays, kept, mark_within
from fxtrain.launchers.outcome import (
    LaunchResult,
    by_cause,
    count_memory_kills,
    describe,
    read_reports,
    tell_memory_kills,
    to_failures,
)
from fxtrain.launchers.process import FORWARDED_SIGNALS, forward_signals, signal_children
from fxtrain.launchers.program import QUIET
from fxtrain.launchers.spec import Invocation, LaunchSpec


def run_elastic(
    spec: LaunchSpec,
    invocation: Invocation,
    *,
    deadline: float | None = None,
    checks_devices: bool = True,
) -> LaunchResult:
    """Run the elastic launcher until all ranks of this machine have exited.

    Args:
        spec: What to launch.
        invocation: What `native` made of it.
        deadline: When to end the ranks, on the monotonic clock; None for never.
        checks_devices: Check that each rank has an accelerator, if there are any.

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
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    os.environ[MARK] = mark_within(os.environ)
    for thread in threading.enumerate():
        if thread.name == FAREWELL:  # an earlier launch of this process may still use the port
            thread.join(FAREWELL_S)
    door = _open_rendezvous(spec)
    with door or nullcontext():
        if spec.log_dir:
            Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
        # Importing torch takes seconds, so check file names and ports first.
        api = importlib.import_module("torch.distributed.run")
        if checks_devices:
            check_devices(spec)
        _quiet()
        with tempfile.TemporaryDirectory(prefix="fxtrain-launch-") as folder:
            stacks = Path(spec.log_dir or folder, "stacks").absolute()
            os.environ.setdefault(_standing().STACKS, str(stacks))
            config, program, arguments = _config(api, invocation.argv[3:], folder)
            _use_store_rendezvous(config, spec, door)
            call = (config, program, arguments)
            with kept(os.environ[MARK], patience_s=spec.shutdown_s):
                logs = Path(spec.log_dir or folder)
                ending = _run(spec, call, logs, serves=door is not None, deadline=deadline)
            if ending.code and (text := _standing().unreported(stacks)):
                sys.stderr.write(f"fxtrain launch: {text}\n")
    return ending


def _run(
    spec: LaunchSpec, call: tuple[Any, ...], logs: Path, *, serves: bool, deadline: float | None
) -> LaunchResult:
    agent = importlib.import_module("fxtrain.launchers.built_in.native.agent")
    signals = importlib.import_module("torch.distributed.elastic.multiprocessing")
    meeting = importlib.import_module("torch.distributed.elastic.rendezvous")
    distributed = importlib.import_module("torch.distributed")
    start, begun, kills = time.monotonic(), time.time(), count_memory_kills()

    def ended(codes: dict[int, int], node: str) -> LaunchResult:
        reports = read_reports(_last_attempt(logs, since=begun)) if codes else {}
        failures = by_cause(to_failures(codes, reports))
        memory = tell_memory_kills(kills)
        return LaunchResult(ranks=spec.world_size, failures=failures, node=node, memory=memory)

    def tell_attempt(attempt: int, result: LaunchResult) -> None:
        why = describe(result) if result.failures else "A rank of another node ended."
        left = spec.restarts - attempt
        sys.stderr.write(
            f"fxtrain launch: Attempt {attempt + 1} failed; {left} more to come. {why}\n"
        )
        sys.stderr.flush()

    try:
        with (
            forward_signals(FORWARDED_SIGNALS, _forward),
            _end_leftovers(spec),
            spares_kept(spec.spares),
        ):
            return agent.run_agent(
                *call, serves=serves, ended=ended, tell_attempt=tell_attempt, deadline=deadline
            )
    except signals.SignalException as error:
        return LaunchResult(ranks=spec.world_size, signal=int(error.sigval))
    except agent.LostRendezvousError as error:
        raise LaunchError(_lost_rendezvous(spec, error), code="FX701") from error
    except (meeting.RendezvousError, distributed.DistError) as error:
        raise LaunchError(_rendezvous_error(spec, error, time.monotonic() - start)) from error


def _standing() -> Any:
    """Imports torch, so not before `run_elastic` has made its C++ code quiet."""
    return importlib.import_module("fxtrain.ops.stacks")


def _forward(number: int) -> None:
    """Pass a signal on; SIGUSR2 also asks the ranks where they stand, and prints it."""
    signal_children(number)
    if number == signal.SIGUSR2:
        threading.Thread(target=_tell_stacks, name="fxtrain-stacks", daemon=True).start()


def _tell_stacks() -> None:
    try:
        standing = _standing()
        text = standing.described(standing.ask(Path(os.environ[standing.STACKS])))
    except LaunchError as error:  # no rank has called fx.detect yet
        text = str(error)
    sys.stderr.write(f"fxtrain launch: {text}\n")
    sys.stderr.flush()


@contextmanager
def _end_leftovers(spec: LaunchSpec) -> Iterator[None]:
    """End the remaining children of ranks; after a failure, ask the ranks to exit first."""
    ask = True
    try:
        yield
        ask = False
    finally:
        end_strays(os.environ[MARK], patience_s=spec.shutdown_s, ask=ask)


def _open_rendezvous(spec: LaunchSpec) -> socket.socket | None:
    """Listen at the main address, or check that it is reachable, before torch waits for it."""
    if spec.nodes == 1:
        return serve("127.0.0.1", spec.port)
    host = spec.main_address.strip("[]")
    who = f"Node {spec.node_rank} of {spec.nodes}"
    if spec.meets == "static" and spec.node_rank == 0:
        return serve_nodes(host, spec.port, who=who)
    if spec.meets == "c10d" and is_local(host):
        try:
            return listen(host, spec.port)
        except OSError as error:
            # Another launcher of this machine already serves it.
            if error.errno != errno.EADDRINUSE:
                raise LaunchError(
                    f"Cannot listen on port {spec.port}: {error.strerror}. Choose another "
                    f"main_port.",
                    code="FX701",
                ) from error
    reach(host, spec.port, who=who, timeout_s=spec.connect_timeout_s)
    return None


def _use_store_rendezvous(config: Any, spec: LaunchSpec, door: socket.socket | None) -> None:
    """Replace torch's rendezvous, which listens on every interface and unpickles, by ours."""
    host = "127.0.0.1" if spec.nodes == 1 else spec.main_address
    port = spec.port if door is None else door.getsockname()[1]
    config.rdzv_endpoint = f"{host}:{port}"
    config.rdzv_configs |= {
        "meets": "static" if spec.nodes == 1 else spec.meets,
        "rank": spec.node_rank,
        "door": None if door is None else door.fileno(),
        "connect_timeout_s": spec.connect_timeout_s,
        "shutdown_s": spec.shutdown_s,
        "mark": os.environ[MARK],
        "proof": key_proof(derive_key(os.environ.get(SECRET, ""))),
        "hint": _main_hint(spec),
    }


def _main_hint(spec: LaunchSpec) -> str:
    """What is odd about a node 0 whose machine does not have the main address."""
    host = spec.main_address.strip("[]")
    if spec.nodes == 1 or spec.meets != "static" or spec.node_rank or is_local(host):
        return ""
    return (
        f" The main address {host} is none of this machine: start node 0 on the machine that has "
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
    """Parse torch's command line, without options that an older torch does not know."""
    parser = api.get_args_parser()
    known = set(parser._option_string_actions)
    program = argv.index("--no-python")
    options = [
        word
        for word in argv[:program]
        if word.split("=")[0] in known or word.split("=")[0] not in _NEWER
    ]
    if not any(word.startswith("--log-dir=") for word in options):
        options.append(f"--log-dir={folder}")
    try:
        return api.config_from_args(parser.parse_args([*options, *argv[program:]]))
    except (TypeError, ValueError) as error:
        raise LaunchError(f"torch's elastic launcher refused its settings: {error}") from error


# Options that torch 2.9 may lack, and that do not change what was requested.
_NEWER = ("--shutdown-timeout",)


def _quiet() -> None:
    """Silence the launcher's own messages about failing ranks: the result has what matters."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _last_attempt(logs: Path, *, since: float) -> list[Path]:
    """Output of the last attempt: folders are RUN/attempt_N/LOCAL_RANK."""
    attempts = [path for path in logs.glob("*/attempt_*") if path.stat().st_mtime >= since - 1]
    if not attempts:
        return []
    last = max(attempts, key=lambda path: (path.stat().st_mtime, int(path.name.split("_")[-1])))
    return sorted(last.glob("*/error.json"))


def _lost_rendezvous(spec: LaunchSpec, error: BaseException) -> str:
    return (
        f"The rendezvous at {spec.main_address}:{spec.port} was lost during the run, so the ranks "
        f"of this node cannot start again: {error} The machine that serves it, its launcher or the "
        f"network to it failed. Start the run again on every node; it continues with the last "
        f"checkpoint."
    )


def _rendezvous_error(spec: LaunchSpec, error: BaseException, waited_s: float) -> str:
    place = f"{spec.main_address or '127.0.0.1'}:{spec.port}"
    said = str(error.__cause__ or error).strip().splitlines()
    return (
        f"Node {spec.node_rank} of {spec.nodes} waited {waited_s:.0f} s at {place}, but not all "
        f"nodes joined: {said[0] if said else type(error).__name__} Check that every node was "
        f"started with the same main address, port, number of nodes and run_id."
    )
