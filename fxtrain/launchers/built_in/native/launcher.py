"""torch's elastic launcher: its command line for a spec."""

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.built_in.native.elastic import run_elastic
from fxtrain.launchers.launcher import Launcher
from fxtrain.launchers.machine import Machine, cores_of_ranks, write_cores
from fxtrain.launchers.program import rank_command, shared_environment
from fxtrain.launchers.spec import Invocation, LaunchSpec

_STREAMS = {"none": "0", "out": "1", "err": "2", "both": "3"}
_ON_CPU = ("node", "exclusive")


def native(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The command line of torchrun, which runs in this process so that torch is imported once.

    Raises:
        LaunchError: several nodes without a main address, or a binding that needs GPUs.
    """
    if spec.nodes > 1 and not spec.main_address:
        raise LaunchError(
            f"{spec.nodes} nodes need an address to connect to. Set main_address to the host name "
            f"or address of node 0, the same on every node."
        )
    nodes = str(spec.nodes) if spec.min_nodes is None else f"{spec.min_nodes}:{spec.nodes}"
    program, *arguments = _ranks(spec, machine)
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
    return Invocation(argv=argv, env=shared_environment(spec, machine) | _store(spec))


def _store(spec: LaunchSpec) -> dict[str, str]:
    """Which process serves the store of the ranks, if nodes may be replaced.

    In torch 2.13, a launcher that serves it publishes its address only once, so that a node that
    joins a later round waits for it in vain. Rank 0 publishes it in every round.
    """
    if spec.meets == "c10d" and spec.nodes > 1:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {}


def _rendezvous(spec: LaunchSpec, machine: Machine) -> list[str]:
    """The address to which nodes connect.

    On one machine, the launcher serves the store on loopback, at a port that the system chooses
    unless one was requested, so that several launches do not collide.
    """
    alone = spec.nodes == 1
    host = "127.0.0.1" if alone else spec.main_address
    local = spec.local_address or ("127.0.0.1" if alone else machine.route.address)
    wait = f"{spec.connect_timeout_s:.0f}"
    settings = [f"timeout={wait}", *spec.rendezvous_options]
    if spec.meets == "c10d":
        settings = [f"join_timeout={wait}", *spec.rendezvous_options]
    return [
        f"--rdzv-backend={spec.meets}",
        f"--rdzv-endpoint={host}:{spec.port}",
        f"--rdzv-id={spec.run_id or 'fxtrain'}",
        f"--rdzv-conf={','.join(settings)}",
        *([f"--node-rank={spec.node_rank}"] if spec.meets == "static" else []),
        *([f"--local-addr={local}"] if local else []),
    ]


def _output(spec: LaunchSpec) -> list[str]:
    words = [f"--role={spec.role}"] if spec.role != "default" else []
    words += [f"--log-dir={spec.log_dir}"] if spec.log_dir else []
    words += [f"--redirects={_STREAMS[spec.redirect]}"] if spec.redirect != "none" else []
    words += [f"--tee={_STREAMS[spec.tee]}"] if spec.tee != "none" else []
    shown = ",".join(map(str, spec.show_ranks))
    return words + ([f"--local-ranks-filter={shown}"] if shown else [])


def _ranks(spec: LaunchSpec, machine: Machine) -> tuple[str, ...]:
    """One rank's command; torch binds ranks with GPUs, and ranks on the CPU bind themselves."""
    if spec.bind == "none" or not spec.cpu:
        return rank_command(spec, machine.python)
    if spec.bind not in _ON_CPU:
        raise LaunchError(
            f"LaunchSpec(bind={spec.bind!r}, cpu=True): torch finds sockets and caches by the "
            f"nearest GPU. For ranks on the CPU, choose one of {', '.join(_ON_CPU)}."
        )
    cores = cores_of_ranks(spec.bind, spec.ranks, machine)
    return rank_command(spec, machine.python, cores="/".join(map(write_cores, cores)))


NATIVE = Launcher(
    name="native",
    help="torch's elastic launcher, on one machine or on several that run the same command",
    invocation=native,
    run=run_elastic,
    uses=[field.name for field in attrs.fields(LaunchSpec)],
    needs=["route"],
)
