"""The process in which `fxtrain plan` runs a program: `_plan_child REQUEST OUT`.

Its environment says which rank it is, in the variables of a launcher, so that `detect` in the
program finds it.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from fxtrain.cli.output import Exit
from fxtrain.errors import FxError
from fxtrain.ops.connecting import launched_plan
from fxtrain.profiling import rehearse
from fxtrain.state import dumps


def main() -> int:
    """Run the program that the arguments name, write the results, and return the exit code."""
    request, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    sys.argv[:] = [request["target"], *request["args"]]
    plan = launched_plan()
    try:
        run = rehearse(
            lambda: _program(request),
            os.environ,
            name=os.path.basename(request["target"]),
            mesh=None if plan is None else plan.mesh,
            device_memory=request["device_memory"],
        )
    except FxError as error:
        sys.stderr.write(f"fxtrain plan: {type(error).__name__}: {error}\n")
        return Exit.WRONG
    out.write_text(dumps(run), encoding="utf-8")
    return 0


def _program(request: dict[str, Any]) -> None:
    """Run the program as Python itself would."""
    target = request["target"]
    try:
        if request["module"]:
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(target))
            runpy.run_path(os.path.abspath(target), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


if __name__ == "__main__":
    sys.exit(main())
