"""How large fxtrain is: files, lines, records, public names, and frames of common calls.

python -m benchmarks.size [--against REVISION]

With a revision of git, its figures stand beside those of the working tree. What is core, and what
stands on it, is read from the contract in `pyproject.toml`.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

from benchmarks._common import show

ROOT = Path(__file__).parent.parent
# Decorators that make a class a record, by the last part of their names.
RECORDS = {"define", "frozen", "launch_record", "record"}
CONTRACT = "The core imports nothing that stands on it"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.size")
    parser.add_argument("--against", metavar="REVISION", help="show its figures too")
    revision = parser.parse_args(arguments).against
    figures = [figures_of(ROOT)]
    if revision:
        with tempfile.TemporaryDirectory() as folder:
            archive = ["git", "archive", revision, "fxtrain", "benchmarks", "pyproject.toml"]
            packed = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
            with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
                tar.extractall(folder, filter="data")
            figures.insert(0, figures_of(Path(folder)))
    names = sorted(set().union(*figures), key=lambda name: (" " in name, name))
    show(
        "The size of fxtrain",
        ["of", *([revision] if revision else []), "now"],
        [[name, *(f"{each.get(name, 0):,}" for each in figures)] for name in names],
    )


def figures_of(root: Path) -> dict[str, int]:
    """Counts of the package below `root`, by what they count."""
    figures: Counter[str] = Counter()
    package, around = root / "fxtrain", around_core(root)
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        part = path.relative_to(package).parts
        folder = part[0] if len(part) > 1 else "top level"
        code = code_lines(text)
        figures["files"] += 1
        figures["lines"] += text.count("\n")
        figures["code lines"] += code
        figures[f"code lines, {folder}"] += code
        module = "/".join(("fxtrain", *part)).removesuffix(".py").replace("/", ".") + "."
        side = "around" if module.startswith(around) else "core"
        figures[f"code lines: {side}"] += code if around else 0
        nodes = list(ast.walk(ast.parse(text)))
        figures["records"] += sum(is_record(node) for node in nodes)
        figures["functions"] += sum(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes
        )
    for call, (frames, files, stays) in measured_frames(root).items():
        figures[f"frames, {call}"] = frames
        figures[f"frames, {call}, files"] = files
        figures[f"frames, {call}, stays in a file"] = stays
    figures["public names"] = int(run_in(root, "import fxtrain; print(len(fxtrain.__all__))"))
    return dict(figures)


def around_core(root: Path) -> tuple[str, ...]:
    """Packages and modules that are not the core, each with a dot behind it."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    found = [each["forbidden_modules"] for each in contracts if each["name"] == CONTRACT]
    return tuple(f"{name}." for names in found for name in names)


def code_lines(text: str) -> int:
    """Lines that hold code: neither blank, nor a comment, nor part of a docstring."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    strings |= set(range(statement.lineno, statement.end_lineno + 1))
    lines: set[int] = set()
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def is_record(node: ast.AST) -> bool:
    """Whether this is a class of attrs."""
    if not isinstance(node, ast.ClassDef):
        return False
    calls = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any(ast.unparse(call).rpartition(".")[2] in RECORDS for call in calls)


def measured_frames(root: Path) -> dict[str, list[int]]:
    """Frames, files and stays that `benchmarks._frames` counts for the package below `root`."""
    return json.loads(run_in(root, (ROOT / "benchmarks" / "_frames.py").read_text()))


def run_in(root: Path, code: str) -> str:
    """The output of Python code that imports the package below `root`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


if __name__ == "__main__":
    main()
