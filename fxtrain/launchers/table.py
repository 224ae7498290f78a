"""From a spec's launcher to the functions that start it."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import attrs

from fxtrain import _extensions
from fxtrain._addresses import Route, find_route, is_local, loopback_route
from fxtrain._optional import installed_entries
from fxtrain._reading import open_file
from fxtrain._record import closest
from fxtrain.errors import LaunchError
from fxtrain.launchers.built_in.native.elastic import NATIVE
from fxtrain.launchers.launcher import COMMON, Launcher
from fxtrain.launchers.machine import Machine, look
from fxtrain.launchers.outcome import LaunchResult
from fxtrain.launchers.spec import Invocation, LaunchSpec, options_from

_BUILT_IN = (
    NATIVE,
    _extensions.MPI,
    _extensions.SLURM,
    _extensions.DEEPSPEED,
    _extensions.TPU,
    _extensions.TPU_POD,
    _extensions.RAY,
    _extensions.KUBERNETES,
    _extensions.SAGEMAKER,
)
LAUNCHERS: Mapping[str, Launcher] = MappingProxyType({entry.name: entry for entry in _BUILT_IN})


def known_launchers() -> dict[str, Launcher]:
    """Every launcher by its name: fxtrain's own, then those of installed packages.

    A package adds one with an entry point in the group `fxtrain.launchers` that loads a
    `Launcher`.

    Raises:
        LaunchError: an entry point loads something else, or two launchers share a name.

    Example:
        >>> from fxtrain.launchers import known_launchers
        >>> "slurm" in known_launchers()
        True
    """
    return {
        **LAUNCHERS,
        **installed_entries(
            taken=LAUNCHERS,
            group="fxtrain.launchers",
            kind=Launcher,
            key=lambda entry: entry.name,
            error=LaunchError,
        ),
    }


# By the names of other programs; "native" starts ranks with torch's own launcher.
_OTHER = {
    **dict.fromkeys(("torchrun", "elastic", "standard", "local", "torch", "accelerate"), "native"),
    **dict.fromkeys(("mpirun", "mpiexec", "openmpi", "mpich"), "mpi"),
    **dict.fromkeys(("srun", "sbatch", "submitit"), "slurm"),
    **dict.fromkeys(("pdsh", "standard-deepspeed"), "deepspeed"),
    **dict.fromkeys(("k8s", "kubectl", "kubeflow"), "kubernetes"),
}


def find_launcher(spec: LaunchSpec) -> Launcher:
    """The entry of a spec's launcher.

    Effects:
        Searches installed packages for launchers, unless it is one of fxtrain's.

    Raises:
        LaunchError: there is no such launcher, or it does not support the spec.
    """
    entry = LAUNCHERS.get(spec.launcher)
    if entry is None:
        known = known_launchers()
        if spec.launcher not in known:
            own = _OTHER.get(spec.launcher.lower())
            near = f" Use launcher={own!r}." if own else closest(spec.launcher, known)
            raise LaunchError(
                f"No launcher {spec.launcher!r}.{near} Available: {', '.join(known)}."
            )
        entry = known[spec.launcher]
    idle = [
        f"{field.name}={getattr(spec, field.name)!r}"
        for field in attrs.fields(LaunchSpec)
        if field.name not in COMMON | entry.uses and getattr(spec, field.name) != field.default
    ]
    if idle:
        raise LaunchError(
            f"The launcher {entry.name} does not support {', '.join(idle)}. Omit it, or "
            f"choose another launcher."
        )
    return entry


def with_options(spec: LaunchSpec) -> LaunchSpec:
    """The spec with its launcher's options as a record: converted from a mapping, or defaults."""
    entry = find_launcher(spec)
    options = {} if spec.options is None else spec.options
    if isinstance(options, Mapping):
        return attrs.evolve(spec, options=options_from(entry.options, options, launcher=entry.name))
    if type(options) is not entry.options:
        wanted = "None" if entry.options is None else f"a {entry.options.__name__}"
        raise LaunchError(
            f"LaunchSpec(launcher={entry.name!r}, options={type(options).__name__}(...)): this "
            f"launcher takes {wanted}."
        )
    return spec


def prepare(spec: LaunchSpec, machine: Machine | None = None) -> Invocation:
    """What `run` would start, without starting it.

    Args:
        spec: What to launch.
        machine: The machine; inspected by default.

    Raises:
        LaunchError: the launcher does not support the spec.

    Example:
        >>> from fxtrain.launchers import LaunchSpec, Machine, prepare, show
        >>> spec = LaunchSpec(target="train.py", launcher="tpu")
        >>> show(prepare(spec, Machine(threads_chosen=True)))[:21]
        'PJRT_DEVICE=TPU pytho'
    """
    entry, spec = find_launcher(spec), with_options(spec)
    if machine is None:
        if hostfile := getattr(spec.options, "hostfile", ""):
            try:  # DeepSpeed's runner would start the program here without it
                open_file(hostfile).close()
            except OSError as error:
                raise LaunchError(f"Cannot read the hostfile: {error}.") from error
        route = loopback_route() if spec.nodes == 1 else Route()
        if entry.run is NATIVE.run and spec.nodes > 1 and spec.main_address:
            route = find_route(spec.main_address, spec.port, local=spec.local_address)
        mpi = spec.options.program if isinstance(spec.options, _extensions.MpiOptions) else ""
        machine = look(os.environ, mpi=mpi, route=route)
    return entry.invocation(spec, machine)


def run(spec: LaunchSpec) -> LaunchResult:
    """Run a program on all ranks and wait until they have exited.

    The ranks share this process's output. Signals are forwarded to them. When one fails, the
    others are ended.

    Effects:
        Those of the launcher: the native one imports torch and sets variables of this process,
        which the ranks inherit; the others write files and start a program. Call it in the main
        thread, where signals arrive.

    Raises:
        LaunchError: the program or launcher does not exist, or the ranks could not be started.
    """
    entry = find_launcher(spec)
    if entry.here:
        check_target(spec)
        if spec.local_address and not is_local(spec.local_address.strip("[]")):
            raise LaunchError(
                f"LaunchSpec(local_address={spec.local_address!r}): this machine has no such "
                f"address. Set one by which the other nodes reach it, or omit it."
            )
    return entry.run(spec, prepare(spec))


def check_target(spec: LaunchSpec) -> None:
    """Check that the script or module of a spec exists.

    Effects:
        Reads the file system; parent packages of a dotted module are imported.

    Raises:
        LaunchError: it does not exist; the message has a similar name.
    """
    check = _executable_problem if spec.executable else _script_problem
    if problem := (_module_problem if spec.module else check)(spec.target):
        raise LaunchError(problem, code="FX702")


def _script_problem(target: str) -> str:
    path = Path(target)
    if path.is_file() or (path / "__main__.py").is_file():
        return ""
    if path.is_dir():
        return f"{path} is a folder without a __main__.py. Name a script in it."
    near = closest(path.name, [script.name for script in path.parent.glob("*.py")])
    return f"{path}: no such script. The current folder is {Path.cwd()}.{near}"


def _executable_problem(target: str) -> str:
    if shutil.which(target) is not None:
        return ""
    return (
        f"{target}: no such program, neither as a path nor on the PATH, or it is not executable. "
        f"Launch a Python script without --no-python."
    )


def _module_problem(name: str) -> str:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and as the ranks will
    if name.endswith(".py") or "/" in name:
        return f"-m {name}: this is a path, not a module. Omit -m, or write it with dots."
    try:
        if importlib.util.find_spec(name) is not None:
            return ""
    except ValueError:  # the module is loaded, and has no spec
        return ""
    except (Exception, SystemExit) as error:  # any error of code outside fxtrain
        return f"-m {name}: importing its parent package failed: {type(error).__name__}: {error}"
    return f"-m {name}: no such module on the path that starts in {here}."
