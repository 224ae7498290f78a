"""Checks that the program exists, before torch is imported and any process starts."""

import importlib.util
import pkgutil
import shlex
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path

from fxtrain.errors import LaunchError
from fxtrain.launchers.spec import LaunchSpec


def check_target(spec: LaunchSpec) -> None:
    """Check that the script or module of a spec exists.

    Effects:
        Reads the file system; parent packages of a dotted module are imported.

    Raises:
        LaunchError: it does not exist; the message has similar names.
    """
    if "\0" in spec.target:
        raise LaunchError(
            "The name of the program contains a null character, which no file can have.",
            code="FX702",
        )
    if spec.executable:
        _check_executable(spec.target)
    elif spec.module:
        _check_module(spec.target)
    else:
        _check_script(Path(spec.target))


def _check_script(path: Path) -> None:
    if path.is_file() or (path.is_dir() and (path / "__main__.py").is_file()):
        return
    if path.is_dir():
        raise LaunchError(
            f"{path} is a folder without a __main__.py. Name a script in it: "
            f"{_list(sorted(str(found) for found in path.glob('*.py')))}.",
            code="FX702",
        )
    folder = path.parent
    if not folder.is_dir():
        raise LaunchError(
            f"{path}: neither this script nor its folder exists. The current folder is "
            f"{Path.cwd()}.",
            code="FX702",
        )
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".py")
    close = get_close_matches(path.name, names, n=3, cutoff=0.5)
    advice = (
        f"Did you mean {_list([str(folder / name) for name in close])}?"
        if close
        else f"The Python files in {folder.resolve()} are {_list(names)}."
    )
    raise LaunchError(f"{path}: no such script. {advice}", code="FX702")


def _check_executable(name: str) -> None:
    if shutil.which(name) is not None:
        return
    if Path(name).is_file():
        raise LaunchError(
            f"{name} is not executable. Allow it with: chmod +x {shlex.quote(name)}", code="FX702"
        )
    raise LaunchError(
        f"{name}: no such program, neither as a path nor on the PATH. Launch a Python script "
        f"without --no-python.",
        code="FX702",
    )


def _check_module(name: str) -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and as the ranks will
    if name.endswith(".py") or "/" in name:
        raise LaunchError(
            f"-m {name}: this is a path, not a module. Omit -m, or write it with dots.",
            code="FX702",
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise LaunchError(
            f"-m {_shortened(name)}: not a valid module name, which is words separated by dots, "
            f"such as package.module. Launch a script without -m.",
            code="FX702",
        )
    parent, _, last = name.rpartition(".")
    if _found(name):
        return
    package = sys.modules.get(parent)
    where = getattr(package, "__path__", ()) if parent else (here,)
    close = get_close_matches(last, _modules(list(where)), n=3, cutoff=0.5)
    prefix = f"{parent}." if parent else ""
    advice = f" Did you mean {_list([prefix + found for found in close])}?" if close else ""
    raise LaunchError(
        f"-m {name}: no such module on the path that starts in {here}.{advice}", code="FX702"
    )


def _found(name: str) -> bool:
    """Whether a module exists; the packages above it are imported to find it.

    Raises:
        LaunchError: importing such a package fails.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return False
        problem: BaseException = error
    except ValueError:  # the module is loaded, and has no spec
        return True
    except (Exception, SystemExit) as error:  # any error of code outside fxtrain
        problem = error
    raise LaunchError(
        f"-m {name}: importing its parent package failed with {type(problem).__name__}: "
        f"{_shortened(str(problem))}. See the whole traceback with: python -c 'import "
        f"{name.rpartition('.')[0]}'",
        code="FX702",
    ) from problem


def _modules(folders: list[str]) -> list[str]:
    """Names that can be imported from folders, including folders without an __init__.py."""
    plain = {
        entry.name
        for folder in map(Path, folders)
        if folder.is_dir()
        for entry in folder.iterdir()
        if entry.is_dir() and entry.name.isidentifier() and not entry.name.startswith("__")
    }
    return sorted(plain | {found.name for found in pkgutil.iter_modules(folders)})


def _list(names: list[str]) -> str:
    shown = names[:6] + (["..."] if len(names) > 6 else [])
    return ", ".join(shown) if shown else "none"


def _shortened(text: str) -> str:
    """A text with its middle removed if it is long."""
    return text if len(text) <= 100 else f"{text[:50]}...{text[-50:]}"
