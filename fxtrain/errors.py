"""The error tree. A message says what was asked, what was found and what to do.

It ends with a code, whose cause and cure are in `fxtrain/cli/error_codes.md`.
"""

import re

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "ContextError",
    "DataError",
    "FxError",
    "LaunchError",
    "MeshError",
    "MissingPackageError",
    "PlanError",
    "StepError",
]
__dir__ = __all__.copy  # for completion


def escape_unprintable(text: str) -> str:
    """Text that is safe to print: characters that a terminal interprets are escaped, as in `repr`.

    Files contain names and values that end up in messages. An escape sequence in one of them could
    recolor or rewrite the terminal, a change of direction could reorder a line, and half a
    surrogate pair cannot be printed at all. Line breaks and tabs are kept.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


_QUOTED_CODE = re.compile(r" \[(FX\d{3})\]")


class FxError(Exception):
    """Base of every error that fxtrain raises on purpose.

    Its text contains no control characters, wherever it comes from, and ends with its code. If an
    error was caused by another (for example, on another rank), it has the code of the cause.

    Attributes:
        code: What `fxtrain explain` explains, such as "FX602": that of the class, or a more precise
            one that is passed where the error is raised.

    Example:
        >>> import fxtrain as fx
        >>> cause = fx.errors.DataError("Row 7 is empty. Remove it.")
        >>> str(cause), cause.message
        ('Row 7 is empty. Remove it. [FX400]', 'Row 7 is empty. Remove it.')
        >>> str(fx.CollectiveError(f"Another rank failed: {cause}"))
        'Another rank failed: Row 7 is empty. Remove it. [FX400]'
    """

    code: str = "FX001"

    def __init__(self, *args: object, code: str | None = None, **more: object) -> None:
        super().__init__(*args, **more)
        if code is not None:
            self.code = code

    @property
    def message(self) -> str:
        """The text without its code, for a message that quotes it."""
        return _QUOTED_CODE.sub("", escape_unprintable(super().__str__()))

    def __str__(self) -> str:
        quoted = _QUOTED_CODE.search(super().__str__())
        code = self.code if quoted is None else quoted[1]
        return f"{self.message} [{code}]" if self.message else ""


class ContextError(FxError, RuntimeError):
    """The environment does not describe one set of ranks, or they could not be connected."""

    code = "FX100"


class PlanError(FxError, ValueError):
    """A plan, or a value for a plan, is invalid or inconsistent."""

    code = "FX200"


class MeshError(ContextError, PlanError):
    """A mesh does not match the number of ranks, or lacks the requested axis."""

    code = "FX110"


class CollectiveError(FxError, RuntimeError):
    """The ranks disagree about a collective, or one of them never joined it.

    Raised on every rank, with each rank's view of the call.
    """

    code = "FX300"


class DataError(FxError, ValueError):
    """A loader or a batch cannot be split over the ranks as requested."""

    code = "FX400"


class StepError(FxError, RuntimeError):
    """A training step received something that it cannot train on."""

    code = "FX500"


class CheckpointError(FxError, RuntimeError):
    """A checkpoint is incomplete, damaged or does not match the model."""

    code = "FX600"


class LaunchError(FxError, RuntimeError):
    """The ranks could not be started, or one of them failed."""

    code = "FX700"


class MissingPackageError(FxError, ImportError):
    """An optional package is needed and not installed."""

    code = "FX800"
