"""Runs a script with its checkpoints redirected, and ends it at a given point.

`fxtrain verify-resume` and `fxtrain replay` start it on every rank, in place of the script.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fxtrain
from fxtrain import checkpoint, loop
from fxtrain.checkpoint import Saving
from fxtrain.errors import StepError


def main(argv: list[str]) -> None:
    """Run `argv[1]` as the main script, with the orders in `argv[0]`, a JSON object."""
    orders = json.loads(argv[0])
    if orders["kind"] == "verify":
        _redirect(Path(orders["folder"]), orders["saves"])
    else:
        _replay(orders["checkpoint"], orders["update"], debug=orders["debug"])
    script = argv[1]
    sys.argv = argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _put(name: str, function: Any) -> None:
    """Replace a public function, wherever the script finds it."""
    for module in (fxtrain, checkpoint, loop):
        if hasattr(module, name):
            setattr(module, name, function)


def _redirect(folder: Path, stop: int) -> None:
    """Redirect checkpoints to another folder, and end after this many of them."""
    saved: list[str] = []

    def elsewhere(path: Any) -> Any:
        inside = str(path)
        return path if inside.startswith(str(folder)) else str(folder / quote(inside, safe=""))

    save, restore, latest, verify = (
        checkpoint.save,
        checkpoint.restore,
        checkpoint.latest,
        checkpoint.verify,
    )

    def save_and_count(path: Any, *args: Any, **options: Any) -> Saving:
        saving = save(elsewhere(path), *args, **options)
        saved.append(saving.path)
        if len(saved) == stop:
            saving.result()
            if args[0].is_main:
                (folder / "last").write_text(saving.path)
            raise SystemExit(0)
        return saving

    _put("save", save_and_count)
    _put("restore", lambda path, *args, **more: restore(elsewhere(path), *args, **more))
    _put("latest", lambda path: latest(elsewhere(path)))
    _put("verify", lambda path: verify(elsewhere(path)))


def _replay(chosen: str, update: int, *, debug: bool) -> None:
    """Restore a given checkpoint, save none, and report the micro-batches of one update."""
    restore, step = checkpoint.restore, loop.step

    def report_and_stop(ctx: Any, batch: Any, fns: Any) -> Any:
        place = batch.position
        if place.updates > update:
            raise StepError(
                f"replay: the script starts with update {place.updates}, past {update}. Restore "
                f"with fx.restore, and continue with loader.at(restored.position)."
            )
        leads = place.updates == (update if place.micro == 0 else update - 1)
        if debug and leads:
            breakpoint()
        report = step(ctx, batch, fns)
        if leads:
            _tell(ctx, report)
        if place.updates == update and place.micro == 0:
            raise SystemExit(0)
        return report

    _put("step", report_and_stop)
    _put("restore", lambda path, *args, **more: restore(chosen, *args, **more))
    _put("latest", lambda path: chosen)
    _put("save", lambda path, *args, **options: Saving(path=os.fspath(path)))


def _tell(ctx: Any, report: Any) -> None:
    def number(value: Any) -> Any:
        return None if value is None else float(value)

    told = {
        "rank": ctx.rank,
        "update": report.position.updates,
        "micro": report.position.micro,
        "loss": number(report.loss),
        "weight": number(report.weight),
        "grad_norm": number(report.grad_norm),
        "applied": report.applied,
        "skipped": report.skipped,
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
