"""The error tree. A message says what was asked, what was found and what to do."""

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
    "escape_unprintable",
]


def escape_unprintable(text: str) -> str:
    """Text that is safe to print: characters that a terminal interprets are escaped, as in `repr`.

    Files contain names and values that end up in messages. An escape sequence in one of them could
    recolour or rewrite the terminal, a change of direction could reorder a line, and half a
    surrogate pair cannot be printed at all. Line breaks and tabs are kept.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )


class FxError(Exception):
    """Base of every error that fxtrain raises on purpose.

    Its text contains no control characters, wherever it comes from.
    """

    def __str__(self) -> str:
        return escape_unprintable(super().__str__())


class ContextError(FxError, RuntimeError):
    """The environment does not describe one set of ranks, or they could not be connected."""


class PlanError(FxError, ValueError):
    """A plan, or a value for a plan, is invalid or inconsistent."""


class MeshError(ContextError, PlanError):
    """A mesh does not match the number of ranks, or lacks the requested axis."""


class CollectiveError(FxError, RuntimeError):
    """The ranks disagree about a collective, or one of them never joined it.

    Raised on every rank, with each rank's view of the call.
    """


class DataError(FxError, ValueError):
    """A loader or a batch cannot be split over the ranks as requested."""


class StepError(FxError, RuntimeError):
    """A training step received something that it cannot train on."""


class CheckpointError(FxError, RuntimeError):
    """A checkpoint is incomplete, damaged or does not match the model."""


class LaunchError(FxError, RuntimeError):
    """The ranks could not be started, or one of them failed."""


class MissingPackageError(FxError, ImportError):
    """An optional package is needed and not installed."""
