"""What a dry run came upon, in words with what to do."""

import traceback
from collections import Counter
from collections.abc import Sequence

import attrs
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from fxtrain._errors import FxError
from fxtrain.profile.byte_units import show_bytes
from fxtrain.profile.fake_tensors import ValueRead, is_library
from fxtrain.state import PARTS, DryRun, Mesh, Problem, resolve_mesh

__all__ = ["ends_the_run", "find_problems"]

_NO_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# torch's words for what reads memory that a tensor without values does not have.
_WORDS = (".numpy() is not supported for tensor subclasses", "data is not allocated yet")


def ends_the_run(error: BaseException) -> bool:
    """Whether an error is a finding of the dry run, and not a mistake of the user's code."""
    return isinstance(error, (FxError, *_NO_VALUES)) or any(word in str(error) for word in _WORDS)


def find_problems(
    run: DryRun, *, asked: Mesh | None, ended: BaseException | None, peeks: Sequence[ValueRead]
) -> DryRun:
    """The same run with its problems, those that end it first."""
    found = [
        *([] if ended is None else [_ending(ended)]),
        *_memory(run),
        *_mesh(run, asked),
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
            f"{what} gives a shape that depends on values, which a dry run does not have. Use a "
            f"form with a fixed shape, such as a mask that is multiplied, or leave it out here."
        )
    elif isinstance(error, UnsupportedOperatorException):
        text = (
            f"{what} has no rule for shapes alone. Register one with "
            f"torch.library.register_fake, or leave it out here."
        )
    else:
        text = (
            f"{what} reads values, which a dry run does not have ({str(error).splitlines()[0]}) "
            f"Leave it out here, for example where ctx.comm.simulated."
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
            f"A step needs {show_bytes(run.peak)} and the device has {show_bytes(size)}. Most of "
            f"it is {largest}, {show_bytes(getattr(run.memory, largest))}. {_ADVICE[largest]}"
        )
        return [Problem(kind="memory", text=text, fatal=True)]
    if run.setup_peak > size:
        text = (
            f"A step fits, but before the end of the first one this rank held "
            f"{show_bytes(run.setup_peak)} and the device has {show_bytes(size)}. Build the model "
            f"on the CPU or the meta device, and let only this rank's part onto the device."
        )
        return [Problem(kind="memory", text=text)]
    return []


_ADVICE = {
    "parameters": "Shard them over more ranks, or hold them in a smaller number format.",
    "gradients": "Shard them over more ranks.",
    "optimizer": "Shard its state over more ranks, or choose an optimizer with less of it.",
    "buffers": "Look for buffers that could be made when they are needed.",
    "activations": "Use smaller batches, accumulate=, recompute=, or split a sequence or tensor "
    "axis.",
    "other": "Look for what is kept from step to step, such as outputs of earlier batches.",
}


def _mesh(run: DryRun, asked: Mesh | None) -> list[Problem]:
    if asked is None or resolve_mesh(asked, run.world) == run.mesh:
        return []
    text = (
        f"The program chose {_sizes(run.mesh)} itself, so that {_sizes(asked)} was not used. Let "
        f"it call fx.detect() without mesh=."
    )
    return [Problem(kind="mesh", text=text)]


def _sizes(mesh: Mesh) -> str:
    shown = ", ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size != 1)
    return f"Mesh({shown})"


def _steps(run: DryRun, ended: BaseException | None) -> list[Problem]:
    if run.updates > 1 or ended is not None:
        return []
    text = (
        "Only one update ran, so that the figures are those of a first step, which may set things "
        "up. Let it run at least three."
    )
    return [Problem(kind="steps", text=text)]


def _values(peeks: Sequence[ValueRead]) -> list[Problem]:
    places = Counter((peek.where, peek.given) for peek in peeks if peek.where)
    return [
        Problem(
            kind="value",
            text=f"This line looks at the value of a tensor, seen {count} times; a dry run has "
            f"none and said {given}. If the program branches on it, the figures are those of that "
            f"branch. On a device it also waits for all work before it.",
            where=where,
        )
        for (where, given), count in places.items()
    ]


def _place(error: BaseException) -> str:
    """File and line of the innermost frame of the user's own code that an error passed."""
    frames = [
        (frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    own = [f"{file}:{line}" for name, file, line in frames if not is_library(str(name))]
    return own[-1] if own else ""
