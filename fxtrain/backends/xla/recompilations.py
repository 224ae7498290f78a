"""Counts compiled steps: on XLA, every new shape costs a compilation."""

import warnings

import attrs

from fxtrain.ops import xla_runtime


@attrs.define(kw_only=True, eq=False)
class RecompilationLog:
    """Compilations inside the steps of one model.

    It only counts and warns.

    Attributes:
        quiet_steps: Steps that may compile: the first ones create gradients and optimizer states.
            None never warns.
        steps: Micro-batches so far.
        compiled: Those that were compiled.
        before: Compilations in the process when the step began.
    """

    quiet_steps: int | None
    steps: int = 0
    compiled: int = 0
    before: int | None = None

    def begin(self) -> None:
        """Start a step; compilations before it are not its own."""
        self.before = xla_runtime.compilations()

    def end(self) -> None:
        """End a step; warn if it was compiled, at increasing intervals."""
        now = xla_runtime.compilations()
        before, self.before = self.before, now
        self.steps += 1
        if before is None or now == before:
            return
        self.compiled += 1
        if self.quiet_steps is None or self.steps <= self.quiet_steps:
            return
        often = self.compiled
        if often & (often - 1) and often > self.quiet_steps + 1:  # at powers of two only
            return
        warnings.warn(
            f"XLA recompiled step {self.steps} of this model; {often} of its steps have been "
            f"compiled. Each new shape, and each Python number that changes from or to 0 or 1, "
            f"makes a new graph. Use DataLoader(drop_last=True) or pad rows to a few lengths.",
            stacklevel=6,
        )
