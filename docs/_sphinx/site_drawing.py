"""Shapes of a picture as SVG, which takes its colors from the page: dark and light.

Needs no Sphinx.
"""

from collections.abc import Iterable, Sequence
from html import escape

import attrs

__all__ = ["Drawing", "arrow", "bar", "box", "label", "svg_of"]


@attrs.frozen(kw_only=True)
class Drawing:
    """A picture: its shapes in SVG, and its size in units of 1/16 em.

    Attributes:
        title: What it shows, in a few words.
        shapes: Elements of SVG, the first at the back.
        width: Its width.
        height: Its height.
    """

    title: str
    shapes: tuple[str, ...]
    width: int
    height: int


def svg_of(drawing: Drawing, description: str, name: str) -> str:
    """A picture as an element of HTML that reads as text where it cannot be seen.

    Args:
        drawing: What to draw.
        description: What it shows, in words.
        name: Unique among the pictures of a page.
    """
    marker = (
        f'<marker id="{name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" class="ink"/></marker>'
    )
    shapes = "\n".join(drawing.shapes).replace("url(#head)", f"url(#{name}-head)")
    return (
        f'<div class="picture" tabindex="0" role="group" aria-label="{escape(drawing.title)}">'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width} {drawing.height}" '
        f'width="{drawing.width}" height="{drawing.height}" role="img" '
        f'aria-labelledby="{name}-title {name}-text">\n'
        f'<title id="{name}-title">{escape(drawing.title)}</title>\n'
        f'<desc id="{name}-text">{escape(" ".join(description.split()))}</desc>\n'
        f"<defs>{marker}</defs>\n{shapes}\n</svg></div>\n"
    )


def box(
    x: float, y: float, width: float, height: float, text: str | Sequence[str] = "", kind: int = 0
) -> str:
    """A rectangle with lines of text in its middle. Kinds 1 to 6 have colors of their own."""
    lines = [text] if isinstance(text, str) else list(text)
    middle = y + height / 2 - 8 * (len(lines) - 1) + 4.5
    texts = [
        label(x + width / 2, middle + 16 * number, line, "middle")
        for number, line in enumerate(lines)
        if line
    ]
    shape = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="k{kind}"/>'
    )
    return "".join([shape, *texts])


def bar(x: float, y: float, parts: Iterable[tuple[float, int]], height: float) -> str:
    """Rectangles one after another: the width and the kind of each."""
    found = []
    for width, kind in parts:
        found.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="k{kind}"/>'
        )
        x += width
    return "".join(found)


def label(x: float, y: float, text: str, anchor: str = "start", *, small: bool = False) -> str:
    """A line of text. The anchor is its start, middle or end."""
    style = ' class="small"' if small else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    """A line through points, with a head at its end."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    style = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="{path}" class="line"{style} marker-end="url(#head)"/>'
