"""A tracker is a record of functions; what they are given are records too."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs
from torch import Tensor

from fxtrain.state import DistContext, Plan, Position

__all__ = ["At", "Start", "Tracker", "Unsupported", "nothing"]


def nothing(*_: Any) -> None:
    """Do nothing."""


def _open(config: Any, start: "Start") -> None:
    """Open nothing."""


class Unsupported(Exception):
    """A tracker has no place for what is logged."""


def _lacks(what: str) -> Any:
    def default(self: "Tracker") -> Any:
        def refuse(*_: Any) -> NoReturn:
            raise Unsupported(f"{self.name} does not support run.{what}.")

        return refuse

    return attrs.Factory(default, takes_self=True)


@attrs.frozen(kw_only=True)
class At:
    """Where in a run something was logged.

    Attributes:
        step: Optimizer updates.
        rows: Rows consumed since the start of the run, if known.
        epoch: Pass over the data, if known.
        time: Seconds since 1970.
    """

    step: int
    rows: int | None = None
    epoch: int | None = None
    time: float


@attrs.frozen(kw_only=True, eq=False)
class Start:
    """What a tracker needs to know of the run that it opens.

    Attributes:
        id: Of the run, the same after it was continued: 32 letters and digits, unique for each
            rank that tracks.
        run: The run's id on every rank.
        name: For people.
        folder: Of the run, on this machine.
        rank: The rank that tracks.
        everyone: All ranks track, not only rank 0.
        identity: What the tracker's own `identity` gave when the run was opened before; empty
            for a new run.
        position: Where the run continues; everything logged after it will be logged again.
        params: Hyperparameters by name: the plan, the context, the settings.
        ctx: The context.
        plan: The plan, if given.
        settings: What the user wants to be known of the run.
        time: When it was opened.
    """

    id: str
    run: str
    name: str
    folder: Path
    rank: int = 0
    everyone: bool = False
    identity: str = ""
    position: Position = attrs.field(factory=Position)
    params: Mapping[str, Any]
    ctx: DistContext
    plan: Plan | None = None
    settings: Mapping[str, Any]
    time: float

    @property
    def resumed(self) -> bool:
        """Whether the tracker has opened this run before."""
        return bool(self.identity)

    def place(self, given: str | None, name: str) -> Path:
        """A folder for this rank: the one that a config gives, or one in the run's folder."""
        found = self.folder / name if given is None else Path(given)
        return found / f"rank{self.rank}" if self.rank else found


@attrs.frozen(kw_only=True)
class Tracker:
    """How one kind of tracker writes: functions only, no state.

    `open` is called in the caller's thread; all others by one background thread, in the order in
    which they were asked for. What they raise is reported once, and training continues. A
    function that is missing is reported once, at the first call that needs it. Change a
    function with `attrs.evolve(row, log=mine)`.

    Attributes:
        name: Shown in messages.
        config: The config type that selects this row; None for one that `fx.track` is given
            directly.
        open: (config, Start) → the library's own object for this run, or anything else: `native`.
        identity: (native) → what the library calls this run; given back to `open` to continue it.
        refuses: (name) → why the library takes no metric, image, ... of this name; empty if it
            does.
        params: (native, Start) → None; writes the hyperparameters.
        log: (native, values, At) → None; numbers by name.
        text: (native, name, text, At) → None.
        image: (native, name, image, At) → None; a uint8 tensor on the CPU of shape (height,
            width, channels), with 1, 3 or 4 channels.
        table: (native, name, columns, rows, At) → None; each row a list of plain values.
        artifact: (native, name, path, At) → None; a file or folder.
        flush: (native) → None.
        close: (native, failed) → None; whether an exception ended the run.
        closed_by_caller: `close` is called by the thread that closes the run, for libraries that
            change signal handlers, which only the main thread may.
    """

    name: str
    config: type | None = None
    open: Callable[[Any, Start], Any] = _open
    identity: Callable[[Any], str] = lambda native: "same"
    refuses: Callable[[str], str] = lambda name: ""
    params: Callable[[Any, Start], None] = nothing
    log: Callable[[Any, Mapping[str, float], At], None] = attrs.field(default=_lacks("log"))
    text: Callable[[Any, str, str, At], None] = attrs.field(default=_lacks("text"))
    image: Callable[[Any, str, Tensor, At], None] = attrs.field(default=_lacks("image"))
    table: Callable[[Any, str, Sequence[str], Sequence[Sequence[Any]], At], None] = attrs.field(
        default=_lacks("table")
    )
    artifact: Callable[[Any, str, Path, At], None] = attrs.field(default=_lacks("artifact"))
    flush: Callable[[Any], None] = nothing
    close: Callable[[Any, bool], None] = nothing
    closed_by_caller: bool = False
