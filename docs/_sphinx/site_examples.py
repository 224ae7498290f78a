"""Pages of the examples: the table of their README, and a page for each script.

Generated from examples/, so that a page always shows the file that CI runs. Needs no Sphinx.
"""

import ast
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

__all__ = ["example_pages", "link_from", "page_of"]

_DOCS = Path(__file__).parents[1]
_EXAMPLES = _DOCS.parent / "examples"
_COMPARED = _EXAMPLES / "coming_from"
_VERSIONS = {"raw": "Raw loop", "accelerate": "With Accelerate", "fxtrain": "With fxtrain"}


def example_pages() -> dict[str, str]:
    """Markdown of the pages by their name relative to docs/ and without suffix."""
    tasks = sorted(path for path in _COMPARED.iterdir() if list(path.glob("*_raw.py")))
    scripts = [path for path in sorted(_EXAMPLES.rglob("*.py")) if path.parent not in tasks]
    pages = {_name(path): _script_page(path) for path in scripts}
    pages |= {_name(path): _task_page(path) for path in tasks}
    pages |= {_name(path): _notebook_page(path) for path in _EXAMPLES.glob("*.ipynb")}
    inner = {name for name in pages if name.startswith("examples/coming_from/")}
    pages |= {
        "examples/coming_from/index": _readme_page(_COMPARED / "README.md", inner),
        "examples/index": _readme_page(
            _EXAMPLES / "README.md", {*pages, "examples/coming_from/index"} - inner
        ),
    }
    return pages


def page_of(path: Path) -> str | None:
    """The page that shows a file, by its name relative to docs/ and without suffix."""
    if path.suffix == ".md" and path.is_relative_to(_DOCS):
        return path.relative_to(_DOCS).with_suffix("").as_posix()
    if path.name == "README.md" and path.is_relative_to(_EXAMPLES):
        return _name(path.with_name("index"))
    if path.parent.parent == _COMPARED:
        path = path.parent
    is_shown = path.suffix in (".py", ".ipynb") or path.parent == _COMPARED
    return _name(path) if is_shown and path.is_relative_to(_EXAMPLES) else None


def link_from(page: str, path: Path, anchor: str = "") -> str:
    """A link of a page to a file: to the page that shows it, or to the file as a download.

    A download has no anchors: "#a-heading" is part of a link to a page only.
    """
    folder = (_DOCS / page).parent
    name = page_of(path)
    if name is None:
        return f"path:{Path(os.path.relpath(path, folder)).as_posix()}"
    target = Path(os.path.relpath(_DOCS / f"{name}.md", folder))
    return f"{target.as_posix()}{anchor}"


def _name(path: Path) -> str:
    return f"examples/{path.relative_to(_EXAMPLES).with_suffix('').as_posix()}"


def _readme_page(path: Path, pages: set[str]) -> str:
    """A README with links to pages, and the pages that it leads to in the navigation."""
    page = page_of(path)
    assert page is not None

    def link(found: re.Match[str]) -> str:
        return f"]({link_from(page, (path.parent / found[1]).resolve(), found[2] or '')})"

    text = re.sub(r"\]\((?!\w+:)([^)#]+)(#[^)]*)?\)", link, path.read_text())
    order = [name for name in dict.fromkeys(_linked(text, page)) if name in pages]
    rest = sorted(pages - {*order})
    tree = [os.path.relpath(name, os.path.dirname(page)) for name in (*order, *rest)]
    return "\n".join([text, "```{toctree}", ":hidden:", *tree, "```", ""])


def _linked(text: str, page: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^):]+)\.md\)", text):
        yield os.path.normpath(f"{os.path.dirname(page)}/{target}")


def _script_page(path: Path) -> str:
    about, code = _parts(path)
    return "\n".join([f"# {_title(about)}", "", _prose(about), _source(path, code)])


def _task_page(folder: Path) -> str:
    """The three versions of a script, one below the other."""
    found = {one: folder / f"{folder.name}_{one}.py" for one in _VERSIONS}
    about, _ = _parts(found["raw"])
    page = [f"# {_title(about)}", "", _prose(about.partition("\n\n")[2])]
    for version, path in found.items():
        page += [f"## {_VERSIONS[version]}", "", _source(path, _parts(path)[1])]
    return "\n".join(page)


def _notebook_page(path: Path) -> str:
    page = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        page += [text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```", ""]
    return "\n".join([*page, f"Download: [{path.name}]({_download(path)})", ""])


def _source(path: Path, code: str) -> str:
    return f"```python\n{code}\n```\n\nDownload: [{path.name}]({_download(path)})\n"


def _download(path: Path) -> str:
    page = page_of(path)
    assert page is not None
    return f"path:{Path(os.path.relpath(path, (_DOCS / page).parent)).as_posix()}"


def _parts(path: Path) -> tuple[str, str]:
    """The docstring of a script, and its code."""
    tree = ast.parse(path.read_text())
    lines = path.read_text().splitlines()
    first = tree.body[0].end_lineno or 0
    return ast.get_docstring(tree) or "", "\n".join(lines[first:]).strip()


def _title(docstring: str) -> str:
    """What the first sentence of a docstring is about: what is before its colon, or all of it."""
    sentence = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r": ", sentence, maxsplit=1)[0].rstrip(".")


def _prose(docstring: str) -> str:
    """A docstring as Markdown: what it indents is code."""

    def fenced(found: re.Match[str]) -> str:
        code = textwrap.dedent(found[0]).strip("\n")
        language = "toml" if code.startswith("[") else "sh"
        return f"```{language}\n{code}\n```\n"

    return re.sub(r"(?m)(?:^    .*\n)+", fenced, f"{docstring}\n")
