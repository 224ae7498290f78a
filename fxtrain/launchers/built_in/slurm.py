"""SLURM: srun inside an allocation, or a batch file for sbatch."""

import re
import shlex
from collections.abc import Iterable
from pathlib import PurePath

import attrs

from fxtrain._secret import SECRET
from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import ERRORS, RENDEZVOUS_FIELDS, Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.program import (
    rank_command,
    remote_environment,
    shared_environment,
    threads_of,
)
from fxtrain.launchers.spec import (
    Invocation,
    LaunchSpec,
    each,
    launch_record,
    name_values,
    number_from,
)

_BINDINGS = {"node": "ldoms", "socket": "sockets", "exclusive": "cores"}
_plain = each(re.compile(r"[^\s\"'\\#]+").fullmatch, expected="a word without spaces or quotes")
_line = each(re.compile(r"[^\n]+").fullmatch, expected="one line")


@launch_record
class SlurmOptions:
    """What a job requests from SLURM; each field is the option of sbatch and srun of that name.

    Attributes:
        job_name: Name of the job; by default the program's.
        partition: Partition to run in.
        account: Account to charge.
        qos: Quality of service.
        time: Time limit, such as 1-12:00:00.
        gpus_per_node: GPUs of each node.
        cpus_per_task: Cores of each rank; by default as many as it has threads.
        mem: Memory of each node, such as 64G.
        constraint: Features that nodes must have.
        output: File for the output of the job.
        requeue: Requeue the job after preemption or its time limit: the ranks receive SIGUSR1
            first, to save, and the job returns to the queue.
        warn_s: Time between that signal and the end, in seconds.
        setup: Lines for the shell before the ranks start, such as "module load cuda".
        extra: Further options for sbatch or srun, one each, such as --exclusive.
        file: The batch file; by default in the folder fxtrain-launch.
    """

    job_name: str = attrs.field(default="", validator=_plain)
    partition: str = attrs.field(default="", validator=_plain)
    account: str = attrs.field(default="", validator=_plain)
    qos: str = attrs.field(default="", validator=_plain)
    time: str = attrs.field(default="", validator=_plain)
    gpus_per_node: str = attrs.field(default="", validator=_plain)
    cpus_per_task: int | None = attrs.field(default=None, validator=number_from(1))
    mem: str = attrs.field(default="", validator=_plain)
    constraint: str = attrs.field(default="", validator=_plain)
    output: str = attrs.field(default="", validator=_plain)
    requeue: bool = True
    warn_s: int = attrs.field(default=120, validator=number_from(1))
    setup: tuple[str, ...] = attrs.field(default=(), validator=_line)
    extra: tuple[str, ...] = attrs.field(default=(), validator=_line)
    file: str = ""


def slurm(spec: LaunchSpec, machine: Machine) -> Invocation:
    """srun if this process runs inside a SLURM job, otherwise a batch file and sbatch."""
    if spec.restarts and not machine.slurm_job:
        raise LaunchError(
            f"LaunchSpec(restarts={spec.restarts}): SLURM restarts a job after preemption "
            f"(requeue), not after a rank has failed. Omit restarts."
        )
    if spec.bind not in ("none", *_BINDINGS):
        raise LaunchError(f"LaunchSpec(bind={spec.bind!r}): srun supports {', '.join(_BINDINGS)}.")
    if machine.slurm_job:
        env = shared_environment(spec, machine) | _rendezvous_variables(spec)
        errors = ERRORS if spec.nodes == 1 or spec.log_dir else ""
        return Invocation(argv=_srun(spec, machine, errors=errors), env=env)
    file = spec.options.file or f"fxtrain-launch/{_name(spec)}.sbatch"
    # Values of variables may be secrets: they are passed in the environment of sbatch, by name.
    own = name_values(spec.env)
    exported = [_export(spec.options.extra, own)] if own else []
    return Invocation(
        argv=("sbatch", *exported, file), env=own, files={file: _batch(spec, machine)}
    )


def _export(extra: tuple[str, ...], names: Iterable[str]) -> str:
    """The option that makes sbatch export its environment, plus the requested variables."""
    asked = [word.removeprefix("--export=") for word in extra if word.startswith("--export=")]
    before = asked[-1] if asked else "ALL"
    exported = [] if before.upper() in ("NONE", "NIL") else [before]
    return f"--export={','.join([*exported, *names])}"


def _rendezvous_variables(spec: LaunchSpec) -> dict[str, str]:
    """Only requested variables: ranks find the first node and a port of the job themselves."""
    variables = {"MASTER_ADDR": spec.main_address} if spec.main_address else {}
    return variables | ({"MASTER_PORT": str(spec.main_port)} if spec.main_port else {})


def _srun(spec: LaunchSpec, machine: Machine, *, errors: str) -> list[str]:
    inside = bool(machine.slurm_job)
    words = [
        "srun",
        *_shape(spec, machine),
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        *(_asked(spec) if inside else []),
        *(spec.options.extra if inside else []),
    ]
    if spec.bind != "none":
        words.append(f"--cpu-bind={_BINDINGS[spec.bind]}")
    return [*words, *rank_command(spec, machine.python, errors=errors)]


def _shape(spec: LaunchSpec, machine: Machine) -> list[str]:
    here = threads_of(spec, machine) if machine.slurm_job else spec.threads
    cores = spec.options.cpus_per_task or here
    return [
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.world_size}",
        f"--ntasks-per-node={spec.ranks}",
        *([f"--cpus-per-task={cores}"] if cores else []),
    ]


def _asked(spec: LaunchSpec) -> list[str]:
    """Options of the record that were set, under SLURM's names."""
    names = (
        "job_name", "partition", "account", "qos", "time", "gpus_per_node", "mem", "constraint",
        "output",
    )  # fmt: skip
    values = {name: getattr(spec.options, name) for name in names}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value]


def _name(spec: LaunchSpec) -> str:
    name = spec.options.job_name or PurePath(spec.target).stem
    return re.sub(r"[^\w.-]", "_", name)


def _batch(spec: LaunchSpec, machine: Machine) -> str:
    own = name_values(spec.env)
    env = remote_environment(spec) | _rendezvous_variables(spec)
    env = {name: value for name, value in env.items() if name not in own}
    options = attrs.evolve(spec.options, job_name=_name(spec))
    spec = attrs.evolve(spec, options=options)
    again = ["--requeue", "--open-mode=append", f"--signal=B:USR1@{options.warn_s}"]
    asked = [*_shape(spec, machine), *_asked(spec)]
    asked += again if options.requeue else ["--no-requeue"]
    needs = f"# Needs these variables in the environment of sbatch: {', '.join(own)}."
    lines = [
        "#!/bin/bash",
        "# Written by fxtrain launch, which overwrites it on the next call.",
        *([needs] if own else []),
        *(f"#SBATCH {word}" for word in (*asked, *options.extra)),
        "",
        f"cd {shlex.quote(machine.folder)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        *([] if "OMP_NUM_THREADS" in env | own else [_THREADS]),
        *([] if SECRET in env | own else [_SECRET]),
        *options.setup,
        "",
        f"{shlex.join(_srun(spec, machine, errors=''))} &",
        _REQUEUE if options.requeue else "wait $!",
        "",
    ]
    return "\n".join(lines)


_THREADS = "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
# One secret for all ranks of the job, unknown before it starts.
_SECRET = f"export {SECRET}=${{{SECRET}:-$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n')}}"
# srun passes SIGUSR1 to the ranks. `wait` returns when the signal arrives, so it is repeated.
# A program that succeeded in the meantime is run again too, and finds that it has finished.
_REQUEUE = """\
ranks=$!
preempted=
trap 'preempted=1; kill -USR1 "$ranks"' USR1
wait "$ranks"; code=$?
while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; code=$?; done
if [ -n "$preempted" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"\
"""


SLURM = Launcher(
    name="slurm",
    help="srun inside a SLURM job, otherwise a batch file for sbatch",
    invocation=slurm,
    options=SlurmOptions,
    uses=[*RENDEZVOUS_FIELDS, "bind", "log_dir"],
)
