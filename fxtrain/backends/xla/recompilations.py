"""How often steps are compiled: on XLA every new shape costs a compilation."""

import warnings

import attrs

from fxtrain.ops import xla_runtime

__all__ = ["RecompilationLog"]


@attrs.define(kw_only=True, eq=False)
class RecompilationLog:
    """Compilations inside of the steps of one model.

    It counts, and decides nothing but a warning.

    Attributes:
        quiet_steps: Steps that may be compiled: the first ones make gradients and optimizer states.
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
        """A step begins; what was compiled before it is not its own."""
        self.before = xla_runtime.compilations()

    def end(self) -> None:
        """A step has ended; warn if it was compiled, and less and less often."""
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
            f"XLA compiled step {self.steps} of this model anew; it has compiled {often} of its "
            f"steps. Each new shape, and each Python number that is 0 or 1 now and then, makes "
            f"a new graph. Use DataLoader(drop_last=True) or pad rows to a few lengths.",
            stacklevel=6,
        )
