"""The command of one rank and the variables of all, shared by every launcher."""

from pathlib import Path

from fxtrain.launchers.machine import Machine
from fxtrain.launchers.spec import LaunchSpec, name_values

# torch's C++ code warns of names without reverse DNS, and of closed connections at every end.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_CHILD = Path(__file__).with_name("child.py")

# With these, a rank finds no such device. ROCm's torch reads CUDA's variable.
_NO_ACCELERATORS = {
    "CUDA_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
    "ASCEND_RT_VISIBLE_DEVICES": "",
}


def rank_command(
    spec: LaunchSpec, python: str, *, errors: str = "", cores: str = ""
) -> tuple[str, ...]:
    """The command that becomes one rank, with its error recorded for the launcher.

    Output is unbuffered, so that lines of several ranks keep their order.

    Args:
        spec: What to launch.
        python: The interpreter.
        errors: Folder for the errors of ranks whose launcher does not name a file.
        cores: Cores of each local rank, between slashes.
    """
    how = "module" if spec.module else "program" if spec.executable else "script"
    given = [f"--errors={errors}"] if errors else []
    given += [f"--cores={cores}"] if cores else []
    return (python, "-u", str(_CHILD), how, *given, "--", spec.target, *spec.args)


def plain_command(spec: LaunchSpec, python: str) -> tuple[str, ...]:
    """The program as started without fxtrain, for machines with other paths."""
    if spec.executable:
        return (spec.target, *spec.args)
    return (python, "-u", *(("-m",) if spec.module else ()), spec.target, *spec.args)


def shared_environment(spec: LaunchSpec, machine: Machine) -> dict[str, str]:
    """Variables of all ranks, whichever launcher starts them.

    Example:
        >>> from fxtrain.launchers import LaunchSpec, Machine, shared_environment
        >>> shared_environment(LaunchSpec(target="train.py", ranks=2), Machine(cores=range(8)))
        {'OMP_NUM_THREADS': '4'}
    """
    found = machine.traffic
    if (threads := threads_of(spec, machine)) is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    if spec.cpu:
        found |= _NO_ACCELERATORS
    if spec.gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    return found | name_values(spec.env)


def remote_environment(spec: LaunchSpec) -> dict[str, str]:
    """Variables for ranks on machines whose cores are unknown here."""
    return shared_environment(spec, Machine(threads_chosen=True))


def threads_of(spec: LaunchSpec, machine: Machine) -> int | None:
    """Threads of each rank: as requested; a share of the cores; None if the user has chosen."""
    if spec.threads is not None:
        return spec.threads
    return None if machine.threads_chosen else max(1, len(machine.cores) // spec.ranks)
