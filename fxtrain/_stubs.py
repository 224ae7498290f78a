"""Names that load on first use, from the table that a stub is."""

from pathlib import Path
from typing import Any


def homes_of(module_file: str) -> dict[str, str]:
    """By name, the module that has it, in the stub beside a module's file.

    Each such line of the stub is `from module import name as name`. Type checkers read the same
    table.
    """
    text = Path(module_file).with_suffix(".pyi").read_text("utf-8")
    rows = (line.split() for line in text.splitlines() if " as " in line)
    return {row[3]: row[1] for row in rows}


def load_name(home: str, name: str) -> Any:
    """What `from home import name` gives: a value of a module, or a module of a package."""
    return getattr(__import__(home, fromlist=[name]), name)
