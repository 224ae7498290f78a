"""The pages of docs/: which of them the site shows, and where their links lead. Builds nothing."""

import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxtrain as fx
from docs._sphinx import site_links, site_pages, site_reference
from fxtrain.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = site_pages.written_pages(ROOT / "docs")
LINKED = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]


def _prose(path: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings on GitHub."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def _broken(path: Path) -> Iterator[str]:
    """The relative links of a page that lead nowhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(path)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link


@pytest.mark.parametrize(
    "path", [*PAGES.values(), *LINKED], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(path):
    assert list(_broken(path)) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Two `words`\n\n# Two words\n[a](page.md#two-words-1) [b](#two) [c](none.md) "
        "[d](https://example.org)\n```\n# code\n[e](none.md)\n```\n[f](#code)\n"
    )
    assert list(_broken(page)) == ["#two", "none.md", "#code"]


def _index() -> str:
    return site_pages.with_every_page(PAGES["index"].read_text(), PAGES)


def test_every_page_is_in_one_section():
    generated = set(site_reference.generated_pages())
    listed = [page for pages in site_pages.sections(_index()).values() for page in pages]
    nested = {name for name in generated if name.startswith("reference/fxtrain")}
    shown = Counter([*listed, *(nested - set(listed)), "index"])
    assert shown == Counter([*PAGES, *generated])


def test_a_new_page_is_shown_at_the_end_of_how_to():
    before = site_pages.sections(PAGES["index"].read_text())
    after = site_pages.sections(
        site_pages.with_every_page(PAGES["index"].read_text(), ["new", "steps", "index"])
    )
    assert after == before | {"How to": [*before["How to"], "new"]}
    assert list(after) == ["Start", "Tutorials", "How to", "Concepts", "Reference"]


def test_the_reference_describes_every_public_name_once():
    described = Counter(
        name
        for page in site_reference.generated_pages().values()
        for name in re.findall(r"^\.\. auto(?:class|function|data|exception):: (\S+)", page, re.M)
    )
    assert set(described.values()) == {1}
    names = site_reference.public_names()
    modules = {"fxtrain.ops", "fxtrain.state"}
    assert {names[f"fx.{name}"] for name in fx.__all__} - set(described) == modules
    assert {names[f"fx.ops.{name}"] for name in fx.ops.__all__} - set(described) == set()
    assert names["fx.launch"] == "fxtrain.launch.launch"


def test_the_reference_has_every_field_error_and_command():
    pages = site_reference.generated_pages()
    fields = re.findall(r"^\| `(\w+)` \|", pages["reference/plan_fields"], re.MULTILINE)
    assert {field.name for field in fx.Plan.__attrs_attrs__} <= set(fields)
    errors = re.findall(r"^## (\w+)$", pages["reference/errors"], re.MULTILINE)
    assert errors == [name for name in fx.__all__ if name.endswith("Error")]
    commands = re.findall(r"^## fxtrain (\S+)$", pages["reference/command_line"], re.MULTILINE)
    assert commands == [row.name for row in COMMANDS]


@pytest.mark.parametrize(
    ("page", "summary"),
    [
        ("# A\n\n`fx.a` does it. More.\n", "`fx.a` does it"),
        ("# A\n\n```python\nx = 1\n```\n\nSee [b](b.md): it\nholds.\n", "See b"),
        ("# A\n\n| a | b |\n", ""),
    ],
)
def test_a_summary_is_the_first_sentence(page, summary):
    assert site_pages.summary_of(page) == summary


def test_an_error_that_a_page_shows_is_in_the_reference():
    page = (
        "# A\n\n## B c\n\n<!-- raises: 2 ranks -->\n```python\nx\n```\n\n"
        "```text\nPlanError: a | b\n  c\n```\n"
    )
    shown = site_pages.errors_of({"how_to/x": page})
    assert shown == [("PlanError", "a | b", "how_to/x", "b-c")]
    errors = site_reference.generated_pages(shown)["reference/errors"]
    assert "| `a \\| b` | [x](../how_to/x.md#b-c) |" in errors


def test_llms_text_lists_every_page_with_its_source():
    texts = {name: path.read_text() for name, path in PAGES.items()}
    texts["changelog"] = (ROOT / "CHANGELOG.md").read_text()
    text = site_pages.llms_text("fxtrain", "About.", _index(), texts)
    linked = re.findall(r"\(_sources/([\w/]+)\.md\.txt\)", text)
    assert sorted([*linked, "index"]) == sorted(PAGES)
    assert text.startswith("# fxtrain\n\n> About.\n\n## Start\n\n- [Install](")


def test_the_page_of_variables_lists_those_of_fxtrain():
    source = "".join(path.read_text() for path in (ROOT / "fxtrain").rglob("*.py"))
    found = {name.rstrip("_") for name in re.findall(r"FXTRAIN_[A-Z_]+", source)}
    known = {name.split("__")[0] for name in found}
    shown = re.findall(r"`(FXTRAIN_\w+)", PAGES["environment"].read_text())
    assert known == {name.split("__")[0] for name in shown}


def test_versions_agree():
    for name in ("pyproject.toml", "CITATION.cff"):
        assert (
            re.search(r"^version\b\W*([\d.]+)", (ROOT / name).read_text(), re.M)[1]
            == fx.__version__
        )


ACCELERATE = "start/from_accelerate"
LIGHTNING = "start/from_lightning"


def _said(page: str) -> set[str]:
    """Every name in backticks in the first column of the tables of a page."""
    lines = PAGES[page].read_text().splitlines()
    cells = [
        line.split("|")[1] for line in lines if line.startswith("| `") or line.startswith("| ")
    ]
    return {
        name for cell in cells for code in re.findall(r"`([^`]+)`", cell) for name in _names(code)
    }


def _names(code: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", re.sub(r"\(.*\)", "", code.partition("=")[0]))


def _arguments(function: object) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "kwargs", "deprecated_kwargs"}


def _public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("page", "module", "kind"),
    [
        (ACCELERATE, "accelerate", "Accelerator"),
        (LIGHTNING, "lightning_fabric", "Fabric"),
    ],
)
def test_a_page_has_every_name_of_another_library(page, module, kind):
    found = getattr(pytest.importorskip(module), kind)
    missing = (_public(found) | _arguments(found.__init__)) - _said(page)
    assert missing == set()


def test_names_of_torch_exist():
    assert site_links.address_of("torch.compile(net)").endswith("torch.compile.html#torch.compile")
    assert site_links.address_of("DataLoader") == site_links.TORCH["torch.utils.data.DataLoader"]
    assert site_links.address_of("torch.nothing") is None
    for name in site_links.TORCH:
        pkgutil.resolve_name(name)
