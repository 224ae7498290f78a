"""Memory through one step as a picture: stacked areas in SVG, written by hand."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from fxtrain.profile.byte_units import show_bytes
from fxtrain.state import PARTS, DryRun, Memory

__all__ = ["plot"]

_WIDTH, _HEIGHT = 760, 380
_MIN_LABEL_DISTANCE = 4  # times the fullest moment
_LEFT, _TOP, _RIGHT, _BOTTOM = 80, 48, 16, 84
# A palette that stays apart for the colour-blind (Okabe and Ito), in the order of PARTS.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#999999")


def plot(run: DryRun) -> str:
    """A picture of what one rank holds through one step, as the text of an SVG file.

    The horizontal axis counts allocations, not time.

    Args:
        run: With a timeline, as `dry_run` gives it.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.profile import plot
        >>> moments = fx.state.Memory(parameters=5), fx.state.Memory(parameters=5, activations=3)
        >>> picture = plot(fx.DryRun(name="train.py", world=8, peak=8, timeline=moments))
        >>> picture.startswith("<svg"), picture.count("<polygon")
        (True, 2)
    """
    most = max([run.peak, *(moment.total for moment in run.timeline), 1])
    device = run.device_memory
    # A device that is far from full would leave nothing to see.
    limit = device if device is not None and device < _MIN_LABEL_DISTANCE * most else None
    top = 1.05 * max(most, limit or 0)
    shown = [part for part in PARTS if any(getattr(moment, part) for moment in run.timeline)]
    title = f"{run.name}, rank {run.rank} of {run.world}: {show_bytes(run.peak)} at most"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, size=15),
        *_scale(top),
        *_areas(run.timeline, shown, top),
        *_device(limit, top),
        *_legend(shown),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _areas(moments: Sequence[Memory], shown: Sequence[str], top: float) -> list[str]:
    """One area per part, each standing on those before it."""
    floor = [0] * len(moments)
    areas: list[str] = []
    for part in shown:
        roof = [low + getattr(m, part) for low, m in zip(floor, moments, strict=True)]
        edge = [*_points(roof, top), *reversed(_points(floor, top))]
        label = f"{part}, {show_bytes(max(getattr(moment, part) for moment in moments))} at most"
        areas.append(
            f'<polygon fill="{_colour(part)}" points="{" ".join(edge)}">'
            f"<title>{escape(label)}</title></polygon>"
        )
        floor = roof
    return areas


def _points(heights: Sequence[int], top: float) -> list[str]:
    """Corners of a staircase: memory stays as it is until the next change."""
    wide = (_WIDTH - _LEFT - _RIGHT) / max(1, len(heights))
    return [
        f"{_LEFT + (place + side) * wide:.1f},{_y(height, top):.1f}"
        for place, height in enumerate(heights)
        for side in (0, 1)
    ]


def _y(size: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * size / top


def _scale(top: float) -> list[str]:
    lines: list[str] = []
    for quarter in range(5):
        size = top * quarter / 4
        y = _y(size, top)
        lines.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        lines.append(_text(_LEFT - 6, y + 4, show_bytes(int(size)), anchor="end"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    note = "one step, from update to update →"
    return [*lines, _text(middle, _HEIGHT - _BOTTOM + 18, note, anchor="middle")]


def _device(size: int | None, top: float) -> list[str]:
    if size is None:
        return []
    y = _y(size, top)
    return [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d00" '
        f'stroke-dasharray="6 4"/>',
        _text(_WIDTH - _RIGHT, y - 4, f"device, {show_bytes(size)}", anchor="end"),
    ]


def _legend(shown: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for place, part in enumerate(shown):
        x, y = _LEFT + 112 * place, _HEIGHT - 30
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_colour(part)}"/>')
        lines.append(_text(x + 18, y + 11, part))
    return lines


def _colour(part: str) -> str:
    return _COLOURS[PARTS.index(part)]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(words)}</text>"
