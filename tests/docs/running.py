"""Run the blocks of a page, and compare what they print with what the page says."""

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

import fxtrain
import fxtrain as fx
from fxtrain.testing import Cluster
from tests.docs.blocks import Block
from tests.launched._run import FXTRAIN, PYTHON, Finished, run_fork

__all__ = ["Problem", "problems_of", "unknown_names"]

_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Warnings of torch's C++ code about a machine, as of a socket on one without a resolver.
_WARNED = re.compile(r"^\[W\d{4} .*\n", re.MULTILINE)
_NAMES = {
    "F": torch.nn.functional,
    "attrs": attrs,
    "fx": fx,
    "fxtrain": fxtrain,
    "ops": fx.ops,
    "torch": torch,
}


@attrs.frozen(kw_only=True)
class Problem:
    """A block whose page says something else than what happens.

    Attributes:
        block: Where it is: a block with an error, or one whose text is not what is printed.
        text: What happened.
        found: What the block should contain; None if the block failed.
    """

    block: Block
    text: str
    found: str | None = None


def problems_of(blocks: list[Block], folder: Path, pair: Cluster) -> Iterator[Problem]:
    """Run the blocks of a page in a folder; those for two ranks in a pool."""
    torch.manual_seed(0)  # what a page says of values then holds every time
    with _imports_from(folder), warnings.catch_warnings(), fx.detect() as ctx:
        names: dict[str, Any] = {**_NAMES, "__name__": "page"}
        for number, block in enumerate(blocks):
            if block.kind == "file":
                Path(block.detail).write_text(block.text)
            elif block.kind == "shell":
                yield from _shell_problems(block, folder)
            elif block.language == "python" and block.kind != "not run":
                if block.ranks > 1:
                    setups = [one.text for one in blocks[:number] if one.kind == "setup"]
                    code = "".join([*setups, block.text])
                    result = pair.run(_run_on_rank, code, str(folder))[0]
                elif block.kind == "example":
                    result = _run_code(block.text, {"__name__": "__main__"}, f"line {block.line}")
                else:
                    names.setdefault("ctx", ctx)
                    result = _run_code(block.text, names, f"line {block.line}")
                yield from _compared(block, blocks[number + 1 : number + 2], *result)


@contextlib.contextmanager
def _imports_from(folder: Path) -> Iterator[None]:
    """Work in a folder, and import modules from it only meanwhile."""
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(folder)):
                del sys.modules[name]


def _compared(
    block: Block, after: list[Block], printed: str, error: tuple[str, str] | None
) -> Iterator[Problem]:
    if (error is not None) != (block.kind == "raises"):
        yield Problem(block=block, text=error[1] if error else "no error")
    elif block.kind in ("prints", "raises"):
        assert after, f"line {block.line}: no block follows with the output"
        found = printed if error is None else f"{error[0]}\n"
        found = found.replace(f"{Path.cwd()}/", "")
        if not _same(after[0].text, found):
            yield Problem(block=after[0], text=f"found:\n{found}", found=found)


def _same(said: str, found: str) -> bool:
    return doctest.OutputChecker().check_output(said.rstrip() + "\n", found.rstrip() + "\n", _SAME)


def _run_code(code: str, names: dict[str, Any], at: str) -> tuple[str, tuple[str, str] | None]:
    """What code prints, and its error: as it is shown, and with its traceback."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, at, "exec"), names)
    except Exception as error:
        kind = next(one for one in type(error).__mro__ if not one.__name__.startswith("_"))
        text = f"{kind.__name__}: {error}"
        return out.getvalue(), (text, "".join(traceback.format_exception(error)))
    return out.getvalue(), None


def _run_on_rank(ctx: fx.DistContext, code: str, folder: str) -> tuple[str, Any]:
    names = {**_NAMES, "__name__": "page", "ctx": ctx}
    with contextlib.chdir(folder):
        return _run_code(code, names, "page")


def _shell_problems(block: Block, folder: Path) -> Iterator[Problem]:
    """Run each command of a block, in order, and compare its output."""
    parts, shown, same = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)[1:], "", True
    for command, said in zip(parts[::2], parts[1::2], strict=True):
        done = _run_command(command.replace(" \\\n", " "), folder)
        # The shell's view: what is written to either stream, and for most readers in this order.
        found = (done.out + _WARNED.sub("", done.err)).rstrip()
        found = f"{found}\n" if found else ""
        same = same and _same(said.rstrip(), found.rstrip())
        shown += f"$ {command}\n{said if _same(said.rstrip(), found.rstrip()) else found}"
    if not same:
        yield Problem(block=block, text=f"found:\n{textwrap.indent(shown, '  ')}", found=shown)


def _run_command(command: str, folder: Path) -> Finished:
    words = shlex.split(command.partition("  #")[0])
    if words[:2] == ["rm", "-r"]:
        shutil.rmtree(folder / words[2])
        return Finished(code=0, out="", err="")
    programs = {"python": PYTHON, "fxtrain": FXTRAIN}
    if words[0] not in programs:
        raise ValueError(f"{words[0]}: blocks of commands run {', '.join(programs)} only")
    return run_fork(*programs[words[0]], *words[1:], cwd=folder, COLUMNS="100", NO_COLOR="1")


def unknown_names(code: str) -> list[str]:
    """Names of fxtrain in code that it does not have; for code that cannot run here."""
    compile(code, "page", "exec")
    return [name for name in re.findall(r"\bfx((?:\.\w+)+)", code) if not _has(name)]


def _has(dotted: str) -> bool:
    value: Any = fx
    for part in dotted.split(".")[1:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
        if not isinstance(value, type(os)):  # fields of records are not checked
            return True
    return True
