"""Entries of a nested config by their dotted path."""

import copy
from collections.abc import Mapping
from typing import Any

from fxtrain.errors import PlanError

AUTO = "auto"
ZERO = "zero_optimization"


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table inside a config; empty where it is absent or null."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def autos(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of the entries left at "auto"."""
    found: list[str] = []
    for key, value in data.items():
        if value == AUTO:
            found.append(f"{prefix}{key}")
        elif isinstance(value, Mapping):
            found += autos(value, f"{prefix}{key}.")
    return found


def device(zero: Mapping[str, Any], name: str) -> str:
    """Where a ZeRO section offloads to: none, cpu or nvme."""
    return str(section(zero, name).get("device") or "none")


def autocasts(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed runs torch's autocast over full-precision weights."""
    return section(config, "torch_autocast").get("enabled") is True


def get(config: Mapping[str, Any], path: str) -> Any:
    """The value at a path; None where there is none."""
    *tables, name = path.split(".")
    for table in tables:
        config = section(config, table)
    return config.get(name)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path in place, with the tables on the way."""
    *tables, name = path.split(".")
    for table in tables:
        found = config.setdefault(table, {})
        if found is None:
            found = config[table] = {}
        if not isinstance(found, dict):
            raise PlanError(
                f"The DeepSpeed config has {table}={found!r}, but {path} needs a table there."
            )
        config = found
    config[name] = copy.deepcopy(value)


def drop(config: dict[str, Any], path: str) -> None:
    """Remove the value at a path in place."""
    *tables, name = path.split(".")
    for table in tables:
        config = config[table]
    del config[name]
