"""The table of the examples: every file has a line, and every line a file."""

import ast
import re

from tests.launched._run import ROOT

FOLDER = ROOT / "examples"
FOLDERS = ("complete", "features", "pretrain", "recipes", "walkthrough")


def test_every_example_is_in_the_table():
    linked = {
        FOLDER / link for link in re.findall(r"\]\(([^)]+)\)", (FOLDER / "README.md").read_text())
    }
    assert all(path.exists() for path in linked)
    files = {*FOLDER.glob("*.py"), *FOLDER.glob("*.ipynb")}
    for name in FOLDERS:
        files |= {*(FOLDER / name).glob("*.py")}
    assert files <= linked


def test_every_file_says_how_to_start_it():
    for name in FOLDERS:
        texts = {path: path.read_text() for path in (FOLDER / name).glob("*.py")}
        imported = {*re.findall(r"^from (\w+) import", "\n".join(texts.values()), re.MULTILINE)}
        for path, text in texts.items():
            assert len(text.splitlines()) < 200
            header = " ".join(ast.get_docstring(ast.parse(text)).split())
            if path.stem not in imported:  # by the scripts beside it
                assert f"examples/{name}/{path.name}" in header
                assert "Ends with one JSON line" in header
