"""Problems that a dry run found, each with what to do."""

import traceback
from collections import Counter
from collections.abc import Sequence

import attrs
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from fxtrain._byte_units import show_bytes
from fxtrain.errors import FxError
from fxtrain.profiling.fake_tensors import ValueRead, is_library
from fxtrain.state import DryRun, Mesh, Problem
from fxtrain.state.dry_runs import PARTS
from fxtrain.state.mesh import resolve_mesh

_NO_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# torch's messages for reading the memory of a tensor without values.
_WORDS = (".numpy() is not supported for tensor subclasses", "data is not allocated yet")


def ends_the_run(error: BaseException) -> bool:
    """Whether an error is a result of the dry run rather than a bug in the user's code."""
    return isinstance(error, (FxError, *_NO_VALUES)) or any(word in str(error) for word in _WORDS)


def find_problems(
    run: DryRun, *, requested: Mesh | None, ended: BaseException | None, peeks: Sequence[ValueRead]
) -> DryRun:
    """Return the run with its problems, fatal ones first."""
    found = [
        *([] if ended is None else [_ending(ended)]),
        *_memory(run),
        *_mesh(run, requested),
        *_steps(run, ended),
        *_values(peeks),
    ]
    ordered = sorted(found, key=lambda problem: not problem.fatal)
    return attrs.evolve(run, problems=tuple(ordered))


def _ending(error: BaseException) -> Problem:
    where = _place(error)
    if isinstance(error, FxError):
        text = f"{type(error).__name__}: {error}"
        return Problem(kind="plan", text=text, where=where, fatal=True)
    operator = getattr(error, "func", None)
    if operator is None and isinstance(error, UnsupportedOperatorException):
        operator = error.args[0] if error.args else None
    what = "This line" if operator is None else f"The operator {operator}"
    if isinstance(error, DynamicOutputShapeException):
        text = (
            f"{what} returns a shape that depends on values, which a dry run does not have. Use "
            f"a fixed shape, for example by multiplying with a mask, or skip it in a dry run."
        )
    elif isinstance(error, UnsupportedOperatorException):
        text = (
            f"{what} has no fake implementation. Register one with "
            f"torch.library.register_fake, or skip it in a dry run."
        )
    else:
        text = (
            f"{what} reads values, which a dry run does not have ({str(error).splitlines()[0]}). "
            f"Skip it in a dry run, for example if ctx.comm.simulated."
        )
    kind = "unsupported" if isinstance(error, UnsupportedOperatorException) else "value"
    return Problem(kind=kind, text=text, where=where, fatal=True)


def _memory(run: DryRun) -> list[Problem]:
    size = run.device_memory
    if size is None:
        return []
    if run.peak > size:
        largest = max(PARTS, key=lambda part: getattr(run.memory, part))
        text = (
            f"A step needs {show_bytes(run.peak)}, but the device has {show_bytes(size)}. The "
            f"largest part is {largest}, {show_bytes(getattr(run.memory, largest))}. "
            f"{_ADVICE[largest]}"
        )
        return [Problem(kind="memory", text=text, fatal=True)]
    if run.setup_peak > size:
        text = (
            f"A step fits, but setup and the first step need {show_bytes(run.setup_peak)}, and "
            f"the device has {show_bytes(size)}. Build the model on the CPU or the meta device, "
            f"and move only this rank's shard to the device."
        )
        return [Problem(kind="memory", text=text)]
    return []


_ADVICE = {
    "parameters": "Shard them over more ranks, or store them in a smaller dtype.",
    "gradients": "Shard them over more ranks.",
    "optimizer": "Shard its state over more ranks, or choose an optimizer with less state.",
    "buffers": "Look for buffers that could be computed on demand.",
    "activations": "Use smaller batches, accumulate=, recompute=, or context or tensor "
    "parallelism.",
    "other": "Look for tensors kept from step to step, such as outputs of earlier batches.",
}


def _mesh(run: DryRun, requested: Mesh | None) -> list[Problem]:
    if requested is None or resolve_mesh(requested, run.world) == run.mesh:
        return []
    text = (
        f"The program itself chose {_sizes(run.mesh)}, so {_sizes(requested)} was not used. Call "
        f"fx.detect() without mesh=."
    )
    return [Problem(kind="mesh", text=text)]


def _sizes(mesh: Mesh) -> str:
    shown = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size != 1)
    return f"Mesh({shown})"


def _steps(run: DryRun, ended: BaseException | None) -> list[Problem]:
    if run.updates > 1 or ended is not None:
        return []
    text = (
        "Only one update ran, so the figures are those of a first step and may include setup. Run "
        "at least three updates."
    )
    return [Problem(kind="steps", text=text)]


def _values(peeks: Sequence[ValueRead]) -> list[Problem]:
    places = Counter((peek.where, peek.given) for peek in peeks if peek.where)
    return [
        Problem(
            kind="value",
            text=f"This line reads the value of a tensor ({count} times). A dry run has no values "
            f"and returned {given}. If the program branches on it, the figures are for that "
            f"branch. On a real device, the read also waits for all preceding work.",
            where=where,
        )
        for (where, given), count in places.items()
    ]


def _place(error: BaseException) -> str:
    """File and line of the innermost frame of user code in an error's traceback."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [f"{file}:{line}" for name, file, line in frames if not is_library(str(name))]
    return own[-1] if own else ""
