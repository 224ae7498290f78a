"""`fxtrain report`, `watch` and `profile`: what runs have logged and traced."""

import math
import re
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from fxtrain._display import show_bytes
from fxtrain._drawing import make_table
from fxtrain._reading import write_file
from fxtrain.cli.output import as_json, option, print_renderable, print_text, report
from fxtrain.cli.tables import PICTURES, save_picture
from fxtrain.curves import (
    Curve,
    RunReader,
    check_is_run,
    file_of,
    page_of,
    picture_of,
    read_curves,
    sparkline,
)

_BARS = 30
_MOST_ROWS = 500


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@option("--output", "file to write; report.html by default", metavar="FILE")
@option("--curve", "one metric, as SVG, PNG or PDF by the suffix of FILE", metavar="NAME")
@option("--over", "axis of --curve", click.Choice(["updates", "rows", "time"]), default="updates")
@option("--file", "file in the folder of a run, as in JsonLines(file=)", default="metrics.jsonl")
def REPORT(
    runs: tuple[str, ...], output: str | None, curve: str | None, over: Any, file: str
) -> None:
    """Write one HTML page about runs: curves, plans and how they differ, checkpoints.

    RUN is a folder that fx.track wrote with fx.JsonLines(), which is the default. The page needs
    no network and replaces FILE.
    """
    stem = re.sub(r"[^\w.-]", "-", curve or "report")
    path = Path(output or f"{stem}.{'svg' if curve else 'html'}")
    if curve is not None and path.suffix.lower() not in PICTURES:
        raise click.UsageError(
            f"--output {str(path)!r}: a curve is a picture. Choose a name that ends in "
            f"{', '.join(PICTURES)}."
        )
    curves = read_curves(runs, file=file)
    if curve is None:
        write_file(path, page_of(curves))
    else:
        save_picture(picture_of(curves, curve, over=over), path)
    print_text(f"Wrote {path} ({show_bytes(path.stat().st_size)}).")


@click.command("watch")
@click.argument("run", metavar="RUN")
@option("--every-s", "seconds between two looks at the run", click.FloatRange(min=0.1), default=1.0)
@option("--file", "file in the folder of the run, as in JsonLines(file=)", default="metrics.jsonl")
def WATCH(run: str, every_s: float, file: str) -> None:
    """Show the values of a run as they are logged, until Ctrl-C.

    RUN is a folder that fx.track wrote with fx.JsonLines(), which is the default. In a terminal,
    a run that has not begun yet is waited for; without one, the table is printed once.
    """
    if sys.stdout.isatty():
        _wait(Path(run), file, every_s)
    reader = RunReader(path=file_of(run, file)).read()
    if reader.end:
        check_is_run(reader)
    if not sys.stdout.isatty():
        print_renderable(_table(reader))
        return
    with Live(_table(reader), console=Console(highlight=False), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                live.update(_table(reader.read()), refresh=True)
        except KeyboardInterrupt:
            return


def _wait(folder: Path, file: str, every_s: float) -> None:
    """Wait for the file of a run that has not begun, unless this is a folder of several runs."""
    if not (folder / file).exists():
        click.echo(f"Waiting for {folder / file}", err=True)
    while not (folder / file).exists() and not any(folder.glob(f"*/{file}")):
        time.sleep(every_s)


def _table(reader: RunReader) -> Table:
    curves, count = reader.run.curves, reader.run.damaged
    steps = [curve.places[-1][0] for curve in curves.values()]
    times = [last for c in curves.values() if not math.isnan(last := c.places[-1][2])]
    ago = f", last entry {max(time.time() - max(times), 0):,.0f} s ago" if times else ""
    damaged = f", {count:,} damaged lines" if count else ""
    title = f"{reader.path.parent}: {max(steps, default=0):,.0f} updates{ago}{damaged}"
    rows = [(name, *_cells(curve)) for name, curve in islice(curves.items(), _MOST_ROWS)]
    if (left := len(curves) - _MOST_ROWS) > 0:
        rows.append((f"{left:,} more metrics",))
    return make_table(("Metric", ">Last", ">Lowest", ">Highest", "Curve"), rows, title=title)


def _cells(curve: Curve) -> tuple[str, ...]:
    finite = [value for value in curve.values if math.isfinite(value)]
    low, high = (f"{min(finite):.5g}", f"{max(finite):.5g}") if finite else ("-", "-")
    return f"{curve.values[-1]:.5g}", low, high, sparkline(curve.values, _BARS)


@click.command("profile")
@as_json
@click.argument("path")
def PROFILE(path: str) -> None:
    """Split the time of a step by rank, from the folder PATH of a profile."""
    from fxtrain.profiling import summary

    times = summary(path)
    report({"slowest": times.slowest, **attrs.asdict(times)}, times)
