"""A tracker is a record of functions, which receive records."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs
from torch import Tensor

from fxtrain.state import Config, DistContext, Plan, Position


def is_name(_: Any, __: Any, value: str) -> None:
    """Validate a field of a config that is a name."""
    if not value.strip() or not value.isprintable():
        raise ValueError("choose a name of printable characters.")


def maybe_named() -> Any:
    """A field of a config that is a name, or None."""
    return attrs.field(default=None, validator=is_name)


def arguments() -> Any:
    """A field of a config for further arguments of the library."""
    words = "a table of arguments by name"
    # Not shown, since it may have a key; a mapping has no hash.
    return attrs.field(factory=dict, repr=False, hash=False, metadata={"choose": words})


def nothing(*_: Any) -> None:
    """Do nothing."""


def _open(config: Any, start: "Start") -> None:
    """Open nothing."""


class Unsupported(Exception):
    """A tracker does not support what is logged."""


def _lacks(what: str) -> Any:
    def default(self: "Tracker") -> Any:
        def refuse(*_: Any) -> NoReturn:
            raise Unsupported(f"{self.name} does not support run.{what}.")

        return refuse

    return attrs.Factory(default, takes_self=True)


@attrs.frozen(kw_only=True)
class At:
    """The position at which something was logged.

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
    """The description of a run with which a tracker opens it.

    Attributes:
        id: Id of the run, the same after it is resumed: 32 letters and digits, unique for each
            rank that tracks.
        run: The run's id on every rank.
        name: Display name.
        folder: Folder of the run, on this machine.
        rank: The rank that tracks.
        everyone: Whether all ranks track, not only rank 0.
        identity: The tracker's own `identity` from when the run was opened before; empty for a new
            run.
        position: Where the run resumes; everything logged after it will be logged again.
        params: Hyperparameters by name: the plan, the context, the settings.
        ctx: The context.
        plan: The plan, if given.
        settings: The user's further hyperparameters.
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

    def place(self, folder: str | None, name: str) -> Path:
        """A folder for this rank: that of a config, or one in the run's folder."""
        path = self.folder / name if folder is None else Path(folder)
        return path / f"rank{self.rank}" if self.rank else path


@attrs.frozen(kw_only=True)
class Tracker:
    """How one kind of tracker logs: functions only, no state.

    `open` is called in the caller's thread; all others by one background thread, in the order of
    the calls. What they raise is reported once, and training continues. A missing function is
    reported once, at the first call that needs it. Change a function with
    `attrs.evolve(entry, log=mine)`.

    Attributes:
        name: Shown in messages.
        config: The config type that selects this tracker; None for one that is passed to `fx.track`
            directly.
        package: The package that it imports; empty if it needs none.
        open: (config, Start) → the library's own object for this run, or any other value: `native`.
        identity: (native) → the library's id of this run, passed to `open` when it is resumed.
        refuses: (name) → why the library does not accept this name of a metric, image, ...; empty
            if it does.
        last_steps: (native, Start) → by name, the last step that the library has of a resumed run,
            if it cannot remove entries. Entries up to that step are not written again. Called once,
            before anything is written; names with nothing after `Start.position` may be missing.
        params: (native, Start) → None; writes the hyperparameters.
        log: (native, values, At) → None; numbers by name.
        text: (native, name, text, At) → None.
        image: (native, name, image, At) → None; a uint8 tensor on the CPU of shape (height,
            width, channels), with 1, 3 or 4 channels.
        table: (native, name, columns, rows, At) → None; each row a list of plain values.
        artifact: (native, name, path, At) → None; a file or folder.
        flush: (native) → None.
        close: (native, failed) → None; `failed` if an exception ended the run.
        closed_by_caller: Call `close` in the thread that closes the run, for libraries that change
            signal handlers, which only the main thread may do.
    """

    name: str
    config: type | None = None
    package: str = ""
    open: Callable[[Any, Start], Any] = _open
    identity: Callable[[Any], str] = lambda native: "same"
    refuses: Callable[[str], str] = lambda name: ""
    last_steps: Callable[[Any, Start], Mapping[str, int]] = lambda native, start: {}
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


# What a run is logged to: a tracker's config, its kind, such as "wandb", or a tracker.
Target = Config | Tracker | str
