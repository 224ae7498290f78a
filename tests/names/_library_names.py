"""The public names of Accelerate, Fabric and `TrainingArguments`, read from their source.

    python -m tests.names._library_names

writes those of the installed libraries to `library_names.json`, for environments without them.
"""

import ast
import importlib.util
import json
from pathlib import Path

SNAPSHOT = Path(__file__).with_name("library_names.json")
_FABRIC_PACKAGES = ("", "strategies", "plugins", "plugins.precision", "utilities", "loggers")


def installed_names(library):
    """Lists of names by kind; None if the library is not installed."""
    module = {"lightning": "lightning_fabric"}.get(library, library)
    if importlib.util.find_spec(module) is None:
        return None
    names = {"accelerate": _accelerate, "lightning": _fabric, "transformers": _transformers}
    found = names[library](Path(importlib.util.find_spec(module).origin).parent)
    return {kind: sorted(set(one)) for kind, one in found.items()}


def snapshot(library):
    """As `installed_names`, of the versions that were installed when it was written."""
    return json.loads(SNAPSHOT.read_text())[library]


def _accelerate(root):
    records = _classes(root / "utils/dataclasses.py") | _classes(root / "parallelism_config.py")
    accelerator = _classes(root / "accelerator.py")["Accelerator"]
    states = _classes(root / "state.py")
    configs = _classes(root / "commands/config/config_args.py")
    shown = ("Kwargs", "Plugin", "Config", "Configuration")
    hidden = ("TensorInformation", "DeprecatedFieldDescriptor")
    flags = _calls(root / "commands/launch.py", "add_argument")
    return {
        "class": [
            *_imported(root / "__init__.py"), *_imported(root / "utils/__init__.py"),
            *_defined(root, "state", "data_loader", "optimizer", "scheduler", "tracking", "hooks"),
            *_defined(root, "big_modeling", "launchers", "local_sgd", "logging", "inference"),
            *_defined(root, "checkpointing", "parallelism_config"),
        ],
        "method": [
            name for one in (accelerator, *states.values()) for name in _methods(one)
        ],
        "argument": [
            *_arguments(accelerator),
            *(name for cls, one in records.items() if cls.endswith(shown) and cls not in hidden
              for name in _fields(one)),
        ],
        "flag": [flag.lstrip("-") for flag in flags if flag.startswith("--")],
        "key": [name for one in configs.values() for name in _fields(one)],
    }  # fmt: skip


def _fabric(root):
    strategies = [
        one for path in (root / "strategies").glob("*.py") for one in _classes(path).values()
        if one.name.endswith("Strategy") and not one.name.startswith("_")
    ]  # fmt: skip
    fabric = _classes(root / "fabric.py")["Fabric"]
    packages = [root.joinpath(*name.split("."), "__init__.py") for name in _FABRIC_PACKAGES]
    return {
        "class": [name for path in packages for name in _imported(path)],
        "method": _methods(fabric),
        "argument": [name for one in (fabric, *strategies) for name in _arguments(one)],
        "flag": [flag.lstrip("-") for flag in _calls(root / "cli.py", "option") if "--" in flag],
    }


def _transformers(root):
    arguments = _classes(root / "training_args.py")["TrainingArguments"]
    return {"class": ["TrainingArguments"], "argument": _fields(arguments)}


def _tree(path):
    return ast.parse(path.read_text("utf-8"))


def _public(names):
    return [name for name in names if not name.startswith("_")]


def _classes(path):
    return {node.name: node for node in _tree(path).body if isinstance(node, ast.ClassDef)}


def _imported(path):
    own = ("accelerate", "lightning_fabric")
    nodes = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.ImportFrom)]
    nodes = [node for node in nodes if node.level or str(node.module).startswith(own)]
    names = _public(alias.asname or alias.name for node in nodes for alias in node.names)
    return [name for name in names if name != "*"]


def _defined(root, *modules):
    kinds = (ast.ClassDef, ast.FunctionDef)
    nodes = [node for module in modules for node in _tree(root / f"{module}.py").body]
    return _public(node.name for node in nodes if isinstance(node, kinds))


def _methods(cls):
    return _public(node.name for node in cls.body if isinstance(node, ast.FunctionDef))


def _fields(cls):
    nodes = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    return _public(node.target.id for node in nodes if "ClassVar" not in ast.dump(node.annotation))


def _arguments(cls):
    inits = [node for node in cls.body if getattr(node, "name", "") == "__init__"]
    given = [arg.arg for node in inits for arg in (*node.args.args, *node.args.kwonlyargs)]
    return [name for name in given if name != "self"]


def _calls(path, method):
    """The first string of each call of a method."""
    calls = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
    calls = [node for node in calls if getattr(node.func, "attr", "") == method and node.args]
    return [
        arg.value for node in calls for arg in node.args
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    ]  # fmt: skip


if __name__ == "__main__":
    libraries = ("accelerate", "lightning", "transformers")
    known = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    names = {library: installed_names(library) or known[library] for library in libraries}
    SNAPSHOT.write_text(json.dumps(names, indent=0) + "\n")
