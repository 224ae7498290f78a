"""The tables of the page of names, from the table of names of other libraries.

Needs no Sphinx, so that a test can call it.
"""

import itertools
import re
from collections.abc import Iterator

from fxtrain._other_names import OtherName, other_names

__all__ = ["MARK", "with_names"]

MARK = "<!-- names of other libraries -->"
_LIBRARIES = {
    "accelerate": "Accelerate",
    "lightning": "Fabric and Lightning",
    "transformers": "transformers' Trainer",
    "torch": "torch and torchrun",
}
_KINDS = {
    "class": "classes and functions",
    "method": "methods and attributes",
    "argument": "arguments and fields",
    "flag": "flags",
    "key": "keys of config files",
    "value": "values of settings",
}


def with_names(page: str) -> str:
    """A page with tables of every name in place of the mark."""
    return page.replace(MARK, "\n".join(_tables())) if MARK in page else page


def _tables() -> Iterator[str]:
    for library, name in _LIBRARIES.items():
        for kind, title in _KINDS.items():
            rows = [one for one in other_names() if (one.library, one.kind) == (library, kind)]
            if rows:
                yield from (f"### {name}: {title}", "", "| Name | Here |", "|---|---|")
                for _, same in itertools.groupby(rows, key=lambda one: one[3:]):
                    group = list(same)
                    yield f"| {', '.join(map(_shown, group))} | {_answer(group[0])} |"
                yield ""


def _shown(row: OtherName) -> str:
    owner, _, name = row.name.rpartition(".")
    if row.kind == "value":
        return f'`{row.name.partition(".")[0]}="{row.name.partition(".")[2]}"`'
    name = f"--{name}" if row.kind == "flag" else name
    return f"`{name}` of `{owner}`" if owner else f"`{name}`"


def _answer(row: OtherName) -> str:
    if row.none:
        return row.none
    if row.kind == "value":
        return f"`{row.name.partition('.')[0]}={row.use}`"
    code = re.sub(r"(,? (?:and|or) (?:with )?|(?<=\)), (?=fx\.))", r"`\1`", row.use)
    return f"`{code}`" + (f"; `{row.path}`" if row.path.startswith("launch.") else "")
