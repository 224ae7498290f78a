"""Runs a script with its checkpoints redirected, and ends it at a given point.

`fxtrain verify-resume` and `fxtrain replay` start it on every rank, in place of the script.
"""

import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

from fxtrain import checkpoint, loop, trackers
from fxtrain.backends.core.replica_digests import (
    describe_differences,
    differences_of,
    digests_of,
    verify_replicas,
)
from fxtrain.checkpoint import Saving
from fxtrain.errors import CheckpointError, StepError
from fxtrain.state import Key

_Rows = Mapping[int, Mapping[str, Any]]  # by update, what a rank has recorded of it


def main(argv: list[str]) -> None:
    """Run `argv[1]` as the main script, with the orders in `argv[0]`, a JSON object."""
    orders = json.loads(argv[0])
    if orders["kind"] == "verify":
        _redirect(Path(orders["folder"]), orders["saves"], orders["first"])
    else:
        _replay(orders)
    script = argv[1]
    sys.argv = argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _put(function: Any, replacement: Any) -> None:
    """Replace a function in every module of fxtrain, and so wherever a script finds it."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "fxtrain" and name != __name__:
            for key, value in [*vars(module).items()]:
                if value is function:
                    setattr(module, key, replacement)


def _redirect(folder: Path, stop: int, first: str | None) -> None:
    """Redirect what a run writes to another folder, and end after this many checkpoints.

    The folder is copied to `first` when it has the first one. Trackers write nothing.
    """
    paths: list[str] = []

    def elsewhere(path: Any) -> Any:
        inside = str(path)
        return path if inside.startswith(str(folder)) else str(folder / quote(inside, safe=""))

    save = checkpoint.save

    def save_and_count(path: Any, *args: Any, **options: Any) -> Saving:
        saving = save(elsewhere(path), *args, **options)
        paths.append(saving.path)
        if len(paths) == 1 and first is not None:
            saving.result()
            if args[0].is_main:
                shutil.copytree(folder, first)
        if len(paths) == stop:
            saving.result()
            if args[0].is_main:
                (folder / "last").write_text(saving.path)
            raise SystemExit(0)
        return saving

    _put(save, save_and_count)
    for function in (checkpoint.restore, checkpoint.latest, checkpoint.verify):
        _put(function, lambda path, *args, of=function, **more: of(elsewhere(path), *args, **more))
    _silence(elsewhere)


def _silence(elsewhere: Callable[[Any], Any], **changes: Any) -> None:
    """Have runs write to another folder, to no tracker."""
    fit, track = loop.fit, trackers.track
    silent: Any = {"to": (), **changes}
    _put(fit, lambda a, b, c, path, **more: fit(a, b, c, elsewhere(path), **more | silent))
    _put(track, lambda path, ctx, to=(), **more: track(elsewhere(path), ctx, (), **more))


def _replay(orders: Mapping[str, Any]) -> None:
    """Restore a given checkpoint, save none, and report the micro-batches up to an update."""
    chosen, update, records = orders["checkpoint"], orders["update"], orders["records"]
    restore, step, scratch = checkpoint.restore, loop.step, orders["folder"]
    losses: list[str] = []

    def report_and_stop(ctx: Any, batch: Any, fns: Any) -> Any:
        place = batch.position
        if place.updates > update:
            raise StepError(
                f"replay: the script starts with update {place.updates}, past {update}. Restore "
                f"with fx.restore, and continue with loader.at(restored.position)."
            )
        leads = place.updates == (update if place.micro == 0 else update - 1)
        if orders["debug"] and leads:
            breakpoint()
        report = step(ctx, batch, fns)
        if records is not None:
            losses.append(float(report.loss).hex())
            if not place.micro:
                _record(Path(records), ctx.rank, place.updates, losses, fns.model)
                losses.clear()
        elif leads:
            _print(ctx, report)
        if place.updates == update and place.micro == 0:
            raise SystemExit(0)
        return report

    _put(step, report_and_stop)
    _put(restore, lambda path, *args, **more: restore(chosen, *args, **more))
    _put(checkpoint.latest, lambda path: chosen)
    _put(checkpoint.save, lambda path, *args, **options: Saving(path=os.fspath(path)))
    _put(verify_replicas, lambda model, **_: None)  # which would end the run where they differ
    _silence(lambda path: scratch, checkpoints=scratch)


def _print(ctx: Any, report: Any) -> None:
    numbers = {name: getattr(report, name) for name in ("loss", "weight", "grad_norm")}
    results = {
        "rank": ctx.rank,
        "update": report.position.updates,
        "micro": report.position.micro,
        **{name: None if number is None else float(number) for name, number in numbers.items()},
        "applied": report.applied,
        "skipped": report.skipped,
    }
    sys.stdout.write(json.dumps(results) + "\n")
    sys.stdout.flush()


def _record(folder: Path, rank: int, update: int, losses: Sequence[str], model: Any) -> None:
    digests = {
        part: {str(key): digest for key, digest in rows.items()}
        for part, rows in digests_of(model).items()
    }
    line = {"update": update, "losses": losses, "digests": digests}
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@attrs.frozen(kw_only=True)
class Replayed:
    """An update that was computed several times from one checkpoint."""

    update: int
    losses: tuple[int, ...]  # ranks whose losses differed between the times
    tensors: tuple[int, ...]  # ranks whose parameters or optimizer states did, after it
    replicas: tuple[str, ...]  # which replicas differ after it, if it did not differ from itself


def read_replays(folders: Sequence[Path]) -> list[Replayed]:
    """Compare the updates that a script has recorded in each of several folders."""
    times = [_recorded(folder) for folder in folders]
    updates = [sorted(rows) for ranks in times for rows in ranks.values()]
    if not updates or any(numbers != updates[0] for numbers in updates):
        raise CheckpointError(
            "replay: the script did not run the same updates each time. It should train with "
            "fx.fit, or restore with fx.restore and train with fx.step, and depend on nothing "
            "that has changed since.",
        )
    first, *others = times

    def differing(key: str, update: int) -> tuple[int, ...]:
        return tuple(
            rank
            for rank, rows in sorted(first.items())
            if any(again[rank][update][key] != rows[update][key] for again in others)
        )

    replays: list[Replayed] = []
    for update in updates[0]:
        losses, tensors = differing("losses", update), differing("digests", update)
        digests = [_digests(rows[update]["digests"]) for _, rows in sorted(first.items())]
        same = not (losses or tensors)
        replicas = tuple(describe_differences(differences_of(digests), {})) if same else ()
        replays.append(Replayed(update=update, losses=losses, tensors=tensors, replicas=replicas))
    return replays


def _digests(recorded: Mapping[str, Mapping[str, str]]) -> dict[str, dict[Key, str]]:
    return {
        part: {Key.read(text): digest for text, digest in rows.items()}
        for part, rows in recorded.items()
    }


def _recorded(folder: Path) -> dict[int, _Rows]:
    """By rank."""
    lines_of: dict[int, _Rows] = {}
    for path in folder.glob("rank-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines_of[int(path.stem.removeprefix("rank-"))] = {line["update"]: line for line in lines}
    return lines_of


if __name__ == "__main__":
    main(sys.argv[1:])
