"""Run the blocks of a page, and compare what they print with what the page says."""

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
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
    names: dict[str, Any] = {**_NAMES, "__name__": "page"}
    setups: list[str] = []
    following = {block: after for block, after in zip(blocks, blocks[1:], strict=False)}
    with contextlib.chdir(folder), warnings.catch_warnings(), fx.detect() as ctx:
        for block in blocks:
            if block.kind == "file":
                Path(block.detail).write_text(block.text)
                continue
            if block.kind == "shell":
                yield from _shell_problems(block, folder)
                continue
            if block.language != "python" or block.kind == "not run":
                continue
            setups += [block.text] if block.kind == "setup" else []
            names = names if block.kind == "example" else {"ctx": ctx, **names}
            own = {"__name__": "__main__"} if block.kind == "example" else names
            if block.ranks == 1:
                printed, error = _run(block, own)
            else:
                code = "".join([*setups, *([] if block.kind == "setup" else [block.text])])
                printed, error = pair.run(_run_on_rank, code, str(folder))[0]
            yield from _compared(block, following.get(block), printed, error)


def _compared(
    block: Block, after: Block | None, printed: str, error: tuple[str, str] | None
) -> Iterator[Problem]:
    if (error is not None) != (block.kind == "raises"):
        yield Problem(block=block, text=error[1] if error else "no error")
    elif block.kind in ("prints", "raises"):
        assert after is not None, f"line {block.line}: no block follows with the output"
        found = printed if error is None else f"{error[0]}\n"
        if not _same(after.text, found):
            yield Problem(block=after, text=f"found:\n{found}", found=found)


def _same(said: str, found: str) -> bool:
    return doctest.OutputChecker().check_output(said.rstrip() + "\n", found.rstrip() + "\n", _SAME)


def _run(block: Block, names: dict[str, Any]) -> tuple[str, tuple[str, str] | None]:
    """What code prints, and its error: as it is shown, and with its traceback."""
    return _run_code(block.text, names, f"line {block.line}")


def _run_code(code: str, names: dict[str, Any], at: str) -> tuple[str, tuple[str, str] | None]:
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, at, "exec"), names)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
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
        found = (done.out + done.err).rstrip()
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
