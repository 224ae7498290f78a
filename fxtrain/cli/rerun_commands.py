"""`fxtrain verify-resume` and `fxtrain replay`: runs that are repeated, and compared."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._drawing import make_table
from fxtrain.cli.output import COUNT, Exit, as_json, option, report
from fxtrain.errors import CheckpointError, LaunchError
from fxtrain.launchers import LaunchSpec, check_target, describe, run

_SHOWN = 20
_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("verify-resume", context_settings=_SETTINGS)
@option("--ranks -n", "ranks of this machine", int, default=1)
@option("--cpu", "run on the CPU", is_flag=True)
@as_json
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def VERIFY_RESUME(ranks: int, cpu: bool, program: tuple[str, ...]) -> int:  # noqa: FBT001
    """Check that an interrupted script resumes exactly.

    Runs the script to its second checkpoint and, in a new process, from its first to the second.
    All values of the two must be bitwise equal. The script has to save with fx.save and resume
    from fx.latest by itself, or train with fx.fit; what these and fx.track write goes to a
    temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="fxtrain-resume-") as scratch:
        whole, parts = Path(scratch, "whole"), Path(scratch, "parts")
        straight = _train(program, whole, 2, first=str(parts), ranks=ranks, cpu=cpu)
        resumed = _train(program, parts, 1, ranks=ranks, cpu=cpu)
        return _report_differences(straight, resumed)


@click.command("replay", context_settings=_SETTINGS)
@option("--checkpoint", "folder of the run's checkpoints", required=True)
@option("--update", "the update to repeat", COUNT, required=True)
@option("--ranks -n", "ranks of this machine", int, default=1)
@option("--cpu", "run on the CPU", is_flag=True)
@option("--debug", "stop in pdb before each micro-batch (one rank)", is_flag=True)
@option("--times", "repeat so often, and compare updates since the checkpoint", COUNT, default=1)
@as_json
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def REPLAY(
    checkpoint: str,
    update: int,
    ranks: int,
    cpu: bool,  # noqa: FBT001
    debug: bool,  # noqa: FBT001
    times: int,
    program: tuple[str, ...],
) -> int:
    """Repeat updates of a run, from the nearest checkpoint before one.

    The script trains with fx.fit, or restores with fx.restore and continues with
    loader.at(restored.position). It saves nothing, and stops after the update. The results of
    each of its micro-batches are printed as one line of JSON per rank.

    With --times 2 or more, losses, parameters and optimizer states of every update since the
    checkpoint are compared between the times, and between ranks that hold replicas. An update
    that differs from itself points to hardware, or to kernels that are not deterministic;
    replicas that differ in the same way each time point to a bug.
    """
    if debug and (ranks != 1 or times != 1):
        raise LaunchError("replay --debug works with one rank only. Omit --ranks and --times.")
    nearest = _nearest(checkpoint, update)
    with tempfile.TemporaryDirectory(prefix="fxtrain-replay-") as scratch:
        orders = {
            "kind": "replay",
            "checkpoint": nearest,
            "update": update,
            "debug": debug,
            "folder": scratch,
            "records": None,
        }
        if debug:  # in this process, which has the terminal
            from fxtrain.diagnosis.rerun import main

            check_target(LaunchSpec(target=program[0]))
            main([json.dumps(orders), *program])
            return Exit.WELL
        if times == 1:
            return _launch(program, orders, ranks=ranks, cpu=cpu)
        folders = [Path(scratch, f"time-{number}") for number in range(times)]
        for folder in folders:
            folder.mkdir()
            orders["records"] = str(folder)
            if code := _launch(program, orders, ranks=ranks, cpu=cpu):
                return code
        return _report_replays(nearest, folders)


def _report_replays(start: str, folders: Sequence[Path]) -> int:
    from fxtrain.diagnosis.rerun import read_replays
    from fxtrain.ops.transport.mismatches import ranges

    replays = read_replays(folders)
    parted = next((replay for replay in replays if replay.losses or replay.tensors), None)
    differing = next((replay for replay in replays if replay.replicas), None)
    first, last = replays[0].update, replays[-1].update
    lines = [f"Updates {first} to {last} from {start}, {len(folders)} times:"]
    if parted is not None:
        where = (
            f"in the losses of ranks {ranges([*parted.losses])}"
            if parted.losses
            else (f"in the tensors of ranks {ranges([*parted.tensors])}, with equal losses")
        )
        lines.append(
            f"Update {parted.update} differs from itself, {where}. The updates before it do not; "
            f"those after it start from what it left. Either kernels are not deterministic (try "
            f"torch.use_deterministic_algorithms(True)), or hardware is faulty: repeat this on "
            f"other machines."
        )
    else:
        lines.append("No update differs from itself: all are bitwise equal each time.")
    if differing is not None:
        lines += [
            f"After update {differing.update} replicas differ, in the same way each time:",
            *differing.replicas,
            "This is a bug: look for code that changes parameters on some ranks only.",
        ]
    elif parted is None:
        lines.append(
            "Replicas are equal. If they differed in the run, a machine computed or stored a wrong "
            "number then: it is the one that the error named."
        )
    report([attrs.asdict(replay) for replay in replays], "\n".join(lines))
    return Exit.FOUND if parted or differing else Exit.WELL


def _train(
    program: Sequence[str],
    folder: Path,
    saves: int,
    *,
    first: str | None = None,
    ranks: int,
    cpu: bool,
) -> str:
    """Run the script until it has saved this often; return the path of its last checkpoint.

    What is in the folder after the first checkpoint is copied to `first`.
    """
    folder.mkdir(exist_ok=True)
    last = folder / "last"
    orders = {"kind": "verify", "folder": str(folder), "saves": saves, "first": first}
    code = _launch(program, orders, ranks=ranks, cpu=cpu)
    if code:
        raise LaunchError(f"{program[0]} exited with code {code}. See its output above.")
    if not last.exists():
        raise CheckpointError(
            f"{program[0]} finished before it had saved "
            f"{'twice' if saves == 2 else 'once more'}. It should call fx.save at least twice, "
            f"and restore what fx.latest finds. Train for longer, or save more often."
        )
    return last.read_text()


def _launch(program: Sequence[str], orders: dict[str, Any], *, ranks: int, cpu: bool) -> int:
    check_target(LaunchSpec(target=program[0]))
    ending = run(
        LaunchSpec(
            target="fxtrain.diagnosis.rerun",
            module=True,
            args=(json.dumps(orders), *program),
            ranks=ranks,
            cpu=cpu,
        )
    )
    if ending.code:
        sys.stderr.write(f"{describe(ending)}\n")
    return ending.code


def _report_differences(straight: str, resumed: str) -> int:
    from fxtrain.checkpoint import compare

    differences, leaves = compare(straight, resumed)
    name = Path(straight).name
    rows = [{"path": leaf.path, "whole": leaf.left, "resumed": leaf.right} for leaf in differences]
    data = {"checkpoint": name, "leaves": leaves, "equal": not differences, "differences": rows}
    if rows:
        first = rows[0]["path"]
        title = f"{name}: {len(rows)} of {leaves} leaves differ; the first is {first}"
        shown = [[str(value) for value in row.values()] for row in rows[:_SHOWN]]
        report(data, make_table(("leaf", "uninterrupted", "resumed"), shown, title=title))
    else:
        report(data, f"{name}: all {leaves} leaves are bitwise equal.")
    return Exit.FOUND if differences else Exit.WELL


def _nearest(folder: str, update: int) -> str:
    """The last checkpoint before an update."""
    from fxtrain.checkpoint import before

    checkpoint = before(folder, update)
    if checkpoint is None:
        raise CheckpointError(
            f"No complete checkpoint before update {update} in {folder}.", code="FX601"
        )
    return checkpoint
