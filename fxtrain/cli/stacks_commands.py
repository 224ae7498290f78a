"""`fxtrain stacks` and `fxtrain diagnose`: where the ranks of a run stand."""

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from fxtrain.cli.output import as_json, print_text, report

if TYPE_CHECKING:
    from fxtrain.diagnosis.stacks import Stand


@click.command("stacks")
@click.argument("run", metavar="RUN")
@click.option("--patience-s", type=click.FloatRange(min=0.1), default=3.0, show_default=True,
              help="how long to wait for all ranks")  # fmt: skip
@as_json
def STACKS(run: str, patience_s: float) -> None:
    """Ask all ranks of a run where they stand, without stopping it.

    RUN is the folder given to `fxtrain launch --log-dir`, or in the variable FXTRAIN_STACKS. The
    signal SIGUSR2 to the launcher does the same.
    """
    from fxtrain.diagnosis.stacks import ask

    folder = _folder(run)
    _show(ask(folder, patience_s=patience_s), folder)


@click.command("diagnose")
@click.argument("run", nargs=-1, required=True, metavar="RUN")
@as_json
def DIAGNOSE(run: tuple[str, ...]) -> None:
    """Show where the ranks of a run stood when they last wrote it.

    RUN is as for `fxtrain stacks`, or the folder of the run's checkpoints and metrics. Ranks write
    it when the run makes no progress for three quarters of the timeout of collectives, or when they
    are asked. Or RUN is a folder or files of another program's ranks, as torch's Flight Recorder
    writes them: pickles, which run no code, or JSON.
    """
    from fxtrain.diagnosis.flight_recorder import read_dumps
    from fxtrain.diagnosis.stacks import has_records, read_stands

    folder = _folder(run[0])
    if len(run) == 1 and (has_records(folder) or folder != Path(run[0])):
        _show(read_stands(folder), folder)
    else:
        _show(read_dumps([*map(Path, run)]), None)


def _folder(run: str) -> Path:
    from fxtrain.ops.standing import FOLDER

    inside = Path(run, FOLDER)
    return inside if inside.is_dir() else Path(run)


def _show(stands: "list[Stand]", folder: Path | None) -> None:
    report([attrs.asdict(stand) for stand in stands], lambda: _print(stands, folder))


def _print(stands: "list[Stand]", folder: Path | None) -> None:
    from fxtrain.diagnosis.stacks import DUMPS, describe_stacks

    print_text(describe_stacks(stands))
    if folder is None:
        return
    dumps = folder / DUMPS
    if count := len([*dumps.glob("rank_*")]):
        missing = count < stands[0].record["world_size"]
        some = "--allow-incomplete-ranks " if missing else ""
        print_text(
            f"Collectives in the format of torch's Flight Recorder: torchfrtrace {some}{dumps}"
        )
