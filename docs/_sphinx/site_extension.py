"""The extension of the site: generated pages, links to public names, `llms.txt`."""

import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from docutils import nodes
from docutils.parsers.rst import Directive
from site_drawing import svg_of
from site_examples import example_pages, link_from
from site_links import address_of
from site_names import with_names
from site_pages import GENERATED, errors_of, llms_text, with_every_page, written_pages
from site_pictures import PICTURES
from site_reference import generated_pages, public_names, record_signature
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import find_pending_xref_condition

ABOUT = "Distributed PyTorch training loops made of values and functions."
_PUBLIC = public_names()
_LONG_SIGNATURE = re.compile(r"<dl>\s*((?:<dd><em class=\"sig-param\">.*?</dd>\s*)+)</dl>")
_NO_LINKS = nodes.title | nodes.reference | addnodes.pending_xref | addnodes.download_reference


class Picture(Directive):
    """A picture of `site_pictures`, with its description as the content."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        text = "\n".join(self.content)
        return [nodes.raw("", svg_of(PICTURES[name](), text, f"picture-{name}"), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("picture", Picture)
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _complete_source)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("doctree-read", _link_code)
    app.connect("doctree-read", _unlink_builtins)
    app.connect("missing-reference", _resolve)
    app.connect("html-page-context", _make_accessible, priority=900)  # after the theme's
    app.connect("build-finished", _write_llms_text)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write_pages(app: Sphinx) -> None:
    """Write generated pages beside the others, and remove those that are no longer generated."""
    pages = {app.srcdir / f"{name}.md": text for name, text in _generated(app).items()}
    for path in [path for folder in GENERATED for path in (app.srcdir / folder).rglob("*.md")]:
        if path not in pages:
            path.unlink()
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True, parents=True)
        if not path.exists() or path.read_text() != text:  # an unchanged page is not built again
            path.write_text(text)


def _generated(app: Sphinx) -> dict[str, str]:
    return generated_pages(errors_of(_written_pages(app))) | example_pages()


def _written_pages(app: Sphinx) -> dict[str, str]:
    """Pages that are not generated, by their path relative to docs/ and without suffix."""
    return {name: path.read_text() for name, path in written_pages(Path(app.srcdir)).items()}


def _complete_source(app: Sphinx, page: str, source: list[str]) -> None:
    """Every page in the navigation; examples as pages, other files as downloads."""
    source[0] = with_names(source[0])
    if page == "index":
        source[0] = with_every_page(source[0], _written_pages(app))
    folder = (Path(app.srcdir) / page).parent

    def link(found: re.Match[str]) -> str:
        path = (folder / found[1]).resolve()
        inside = path.is_relative_to(Path(app.srcdir).resolve())
        return found[0] if inside else f"]({link_from(page, path, found[2] or '')})"

    if not page.startswith(GENERATED):
        source[0] = re.sub(r"\]\((\.\./[^)#]*)(#[^)]*)?\)", link, source[0])


def _shorten_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, *signature: str | None
) -> tuple[str, None] | None:
    if what == "exception":
        return "", None
    return (record_signature(value), None) if what == "class" and attrs.has(value) else None


def _link_code(app: Sphinx, doctree: nodes.document) -> None:
    """Inline code that names something public, or of torch, becomes a link to its description."""
    for literal in list(doctree.findall(nodes.literal)):
        name = _PUBLIC.get(literal.astext().partition("(")[0])
        if any(isinstance(one, _NO_LINKS) for one in _ancestors(literal)):
            continue
        if name is None:
            _link_torch(literal)
            continue
        link = addnodes.pending_xref(
            "", refdomain="py", reftype="obj", reftarget=name, refdoc=app.env.docname,
            refexplicit=True, refwarn=False,
        )  # fmt: skip
        literal.replace_self(link)
        link += literal


def _ancestors(node: nodes.Node) -> Iterator[nodes.Node]:
    while node.parent is not None:
        node = node.parent
        yield node


def _link_torch(literal: nodes.literal) -> None:
    address = address_of(literal.astext())
    if address is not None:
        link = nodes.reference("", "", refuri=address)
        literal.replace_self(link)
        link += literal


def _unlink_builtins(app: Sphinx, doctree: nodes.document) -> None:
    """`bytes` in an annotation is Python's, whatever has an attribute of that name."""
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link.get("reftype") == "class" and hasattr(builtins, link["reftarget"]):
            short = find_pending_xref_condition(link, "resolved")
            link.replace_self(short.children if short else link.children)


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.Element
) -> nodes.Element | None:
    """Names as the code has them, such as those in annotations, as the site has them."""
    name = _PUBLIC.get(node.get("reftarget", "").partition("(")[0])
    if node.get("refdomain") != "py":
        return None
    if name is None:
        address = address_of(node["reftarget"])
        return None if address is None else nodes.reference("", "", shown, refuri=address)
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, shown)


def _make_accessible(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """What axe-core misses in the theme: levels of headings, what scrolls by keyboard."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    body = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    context["body"] = _LONG_SIGNATURE.sub(_as_lines, body)


def _as_lines(signature: re.Match[str]) -> str:
    """The arguments of a long signature, which Sphinx writes as definitions without terms."""
    lines = signature[1].replace("<dd>", "<div>").replace("</dd>", "</div>")
    return f'<div class="sig-lines">{lines}</div>'


def _write_llms_text(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    pages = _written_pages(app)
    index = with_every_page(pages["index"], pages)
    texts = {**pages, **_generated(app)}
    texts["changelog"] = (app.srcdir.parent / "CHANGELOG.md").read_text()
    (app.outdir / "llms.txt").write_text(llms_text("fxtrain", ABOUT, index, texts))
