"""The navigation of the site: which page is in which section, and what `llms.txt` says of them.

Needs no Sphinx, so that a test can call it.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "GENERATED", "ShownError", "errors_of", "llms_text", "sections", "summary_of", "title_of",
    "with_every_page", "written_pages",
]  # fmt: skip
# Folders of docs/ that `make docs` writes.
GENERATED = ("reference/", "examples/")
_RAISED = re.compile(
    r"^<!-- raises.*? -->\n```python\n.*?^```\n\n```text\n\w+: (.*?) \[(FX\d{3})\]\n```$",
    re.DOTALL | re.MULTILINE,
)

_TOCTREE = re.compile(r"```\{toctree\}\n(?P<body>.*?)```", re.DOTALL)
_REST = "How to train"  # where a page goes that the index does not list


def written_pages(docs: Path) -> dict[str, Path]:
    """The pages that are not generated, by their path relative to docs/ and without suffix."""
    found = {path.relative_to(docs).with_suffix("").as_posix(): path for path in docs.rglob("*.md")}
    return {name: found[name] for name in sorted(found) if not name.startswith(("_", *GENERATED))}


def sections(index: str) -> dict[str, list[str]]:
    """The pages that the index lists, by the caption of their section.

    Args:
        index: Text of docs/index.md.
    """
    found: dict[str, list[str]] = {}
    for tree in _TOCTREE.finditer(index):
        lines = [line for line in tree["body"].splitlines() if line]
        caption = next(line for line in lines if line.startswith(":caption:"))
        found[caption.removeprefix(":caption:").strip()] = [
            line for line in lines if not line.startswith(":")
        ]
    return found


def with_every_page(index: str, pages: Iterable[str]) -> str:
    """The index with the pages that it does not list at the end of "How to train".

    A new page is on the site from the start; a line in the index moves it to a better place.

    Args:
        index: Text of docs/index.md.
        pages: Names of all pages, relative to docs/ and without suffix.
    """
    listed = {page for names in sections(index).values() for page in names}
    rest = sorted(page for page in pages if page not in listed | {"index"})
    start = index.index(f":caption: {_REST}\n")
    end = index.index("```", start)
    return index[:end] + "".join(f"{page}\n" for page in rest) + index[end:]


class ShownError(NamedTuple):
    """An error that a page shows and explains.

    Attributes:
        code: The code with which it ends.
        message: The first line of its message, without the code.
        page: Name of the page.
        anchor: The heading above it, as an anchor.
    """

    code: str
    message: str
    page: str
    anchor: str


def errors_of(pages: Mapping[str, str]) -> list[ShownError]:
    """The errors that pages show, which a test raises again, in the order of the pages.

    Args:
        pages: Markdown of the pages by name.
    """
    found = []
    for page, text in pages.items():
        for raised in _RAISED.finditer(text):
            heading = re.findall(r"^#+ (.*)$", text[: raised.start()], re.MULTILINE)[-1]
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            found.append(ShownError(raised[2], raised[1].partition("\n")[0], page, anchor))
    return found


def title_of(page: str) -> str:
    """The first heading of a page."""
    return next(line[2:] for line in page.splitlines() if line.startswith("# "))


def summary_of(page: str) -> str:
    """The first sentence of a page's first paragraph of prose; empty if there is none."""
    prose = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", page, flags=re.DOTALL | re.MULTILINE)
    paragraphs = (part.strip() for part in prose.split("\n\n"))
    first = next((part for part in paragraphs if re.match(r"[\w`\[*]", part)), "")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(":.")


def llms_text(name: str, about: str, index: str, texts: dict[str, str]) -> str:
    """What `llms.txt` contains: each page with its first sentence, and where it is.

    A written page is linked as Markdown, and a generated one, which is made of directives, as HTML.

    Args:
        name: Heading.
        about: One sentence under it.
        index: The index with every page.
        texts: Markdown of the pages by name.
    """
    lines = [f"# {name}", "", f"> {about}"]
    for caption, pages in sections(index).items():
        lines += ["", f"## {caption}", ""]
        for page in (page for page in pages if page in texts):
            summary = summary_of(texts[page])
            generated = page.startswith(GENERATED)
            at = f"{page}.html" if generated else f"_sources/{page}.md.txt"
            link = f"- [{title_of(texts[page])}]({at})"
            lines.append(f"{link}: {summary}" if summary else link)
    return "\n".join(lines) + "\n"
