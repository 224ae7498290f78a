"""Tables for terminals, and pictures: how results of all kinds are shown."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fxtrain._optional import optional
from fxtrain.errors import escape_unprintable

# The palette of Okabe and Ito, which color-blind people can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def plain_text(text: str) -> Text:
    """Text that may come from a file, without markup or control characters."""
    return Text(escape_unprintable(text))


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", caption: str = ""
) -> Table:
    """A table of text. A column whose name starts with > is numeric."""
    table = Table(
        title=plain_text(title) if title else None,
        caption=plain_text(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in columns:
        is_number = column.startswith(">")
        name = plain_text(column.removeprefix(">"))
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(plain_text, row))
    return table


def make_figure(needed_by: str, title: str = "", *, height: float = 4, rows: int = 1) -> Any:
    """A `matplotlib.figure.Figure` of this height in inches, with axes one below the other."""
    library = optional("matplotlib.figure", extra="plots", needed_by=needed_by)
    figure = library.Figure(figsize=(8, height), layout="constrained")
    figure.subplots(rows)
    figure.axes[0].set_title(title, loc="left", parse_math=False)
    return figure
