"""`fxtrain report`."""

from pathlib import Path
from typing import Any

import click

from fxtrain._byte_units import show_bytes
from fxtrain._reading import write_file
from fxtrain.cli.output import save_picture, say
from fxtrain.curves import page_of, picture_of, read_curves

_PICTURES = (".svg", ".png", ".pdf")


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--output", metavar="FILE", help="file to write; report.html by default")
@click.option(
    "--curve", metavar="NAME", help="one metric, as SVG, PNG or PDF by the suffix of FILE"
)
@click.option(
    "--over",
    type=click.Choice(["updates", "rows", "time"]),
    default="updates",
    show_default=True,
    help="horizontal axis of --curve",
)
@click.option("--file", default="metrics.jsonl", show_default=True,
              help="file in the folder of a run, as in JsonLines(file=)")  # fmt: skip
def REPORT(
    runs: tuple[str, ...], output: str | None, curve: str | None, over: Any, file: str
) -> None:
    """Write one HTML page about runs: curves, plans and how they differ, checkpoints.

    RUN is a folder that fx.track wrote with fx.JsonLines(), which is the default. The page needs
    no network and replaces FILE.
    """
    path = Path(output or (f"{_as_file(curve)}.svg" if curve else "report.html"))
    if curve is not None and path.suffix.lower() not in _PICTURES:
        raise click.UsageError(
            f"--output {str(path)!r}: a curve is a picture. Choose a name that ends in "
            f"{', '.join(_PICTURES)}."
        )
    found = read_curves(runs, file=file)
    if curve is None:
        write_file(path, page_of(found))
    else:
        save_picture(picture_of(found, curve, over=over), path)
    say(f"Wrote {path} ({show_bytes(path.stat().st_size)}).")


def _as_file(name: str) -> str:
    return "".join(one if one.isalnum() or one in "-_." else "-" for one in name)
