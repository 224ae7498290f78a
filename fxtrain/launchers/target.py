"""Checks that the program exists, before torch is imported and any process starts."""

import importlib.util
import pkgutil
import shlex
import shutil
import sys
from collections.abc import Iterable
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
    check = _executable_problem if spec.executable else _script_problem
    if problem := (_module_problem if spec.module else check)(spec.target):
        raise LaunchError(problem, code="FX702")


def _script_problem(target: str) -> str:
    path = Path(target)
    if path.is_file() or (path / "__main__.py").is_file():
        return ""
    if path.is_dir():
        scripts = map(str, path.glob("*.py"))
        return f"{path} is a folder without a __main__.py. Name a script in it: {_list(scripts)}."
    folder = path.parent
    if not folder.is_dir():
        return (
            f"{path}: neither this script nor its folder exists. The current folder is "
            f"{Path.cwd()}."
        )
    names = [entry.name for entry in folder.iterdir() if entry.suffix == ".py"]
    close = get_close_matches(path.name, names, n=3, cutoff=0.5)
    if close:
        return f"{path}: no such script. Did you mean {_list(str(folder / c) for c in close)}?"
    return f"{path}: no such script. The Python files in {folder.resolve()} are {_list(names)}."


def _executable_problem(target: str) -> str:
    if shutil.which(target) is not None:
        return ""
    if Path(target).is_file():
        return f"{target} is not executable. Allow it with: chmod +x {shlex.quote(target)}"
    return (
        f"{target}: no such program, neither as a path nor on the PATH. Launch a Python script "
        f"without --no-python."
    )


def _module_problem(name: str) -> str:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, and as the ranks will
    if name.endswith(".py") or "/" in name:
        return f"-m {name}: this is a path, not a module. Omit -m, or write it with dots."
    if not all(part.isidentifier() for part in name.split(".")):
        return (
            f"-m {_shortened(name)}: not a valid module name, which is words separated by dots, "
            f"such as package.module. Launch a script without -m."
        )
    parent, dot, last = name.rpartition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return ""
    except ValueError:  # the module is loaded, and has no spec
        return ""
    except (Exception, SystemExit) as error:  # any error of code outside fxtrain
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if not f"{name}.".startswith(f"{missing}."):
            return (
                f"-m {name}: importing its parent package failed with {type(error).__name__}: "
                f"{_shortened(str(error))}. See the whole traceback with: python -c 'import "
                f"{parent}'"
            )
    folders = getattr(sys.modules.get(parent), "__path__", ()) if parent else (here,)
    known = [module.name for module in pkgutil.iter_modules(folders)]
    # Folders without an __init__.py are packages too.
    known += [path.name for folder in folders for path in Path(folder).glob("[!_.]*/")]
    close = get_close_matches(last, known, n=3, cutoff=0.5)
    advice = f" Did you mean {_list(f'{parent}{dot}{c}' for c in close)}?" if close else ""
    return f"-m {name}: no such module on the path that starts in {here}.{advice}"


def _list(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join([*first[:6], *(["..."] if len(first) > 6 else [])]) or "none"


def _shortened(text: str) -> str:
    """A text with its middle removed if it is long."""
    return text if len(text) <= 100 else f"{text[:50]}...{text[-50:]}"
