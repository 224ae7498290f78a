"""Checks that the program exists, before torch is imported and any process starts."""

import importlib.util
import shutil
import sys
from pathlib import Path

from fxtrain._other_names import closest
from fxtrain.errors import LaunchError
from fxtrain.launchers.spec import LaunchSpec


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
        return (
            f"-m {name}: importing its parent package failed with {type(error).__name__}: "
            f"{str(error)[:200]}"
        )
    return f"-m {name}: no such module on the path that starts in {here}."
