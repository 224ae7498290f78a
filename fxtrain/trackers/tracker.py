"""A tracker is a record of functions, which receive records; what trackers of libraries share."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fxtrain._optional import optional
from fxtrain.state import Config, Position
from fxtrain.state.registry import kind_of

KINDS = ("params", "log", "text", "image", "table", "artifact")


def arguments() -> Any:
    """A field of a config for further arguments of the library."""
    words = "a table of arguments by name"
    # Not shown, since it may have a key; a mapping has no hash.
    return attrs.field(factory=dict, repr=False, hash=False, metadata={"choose": words})


def library(config: type, module: str) -> Any:
    """Import a module of the library that a tracker's config needs.

    Raises:
        MissingPackageError: it is not installed; the message has the pip command.
    """
    needed_by = f"fx.trackers.{config.__name__}(...)"
    return optional(module, extra=str(kind_of(config)), needed_by=needed_by)


def _nothing(*_: Any) -> None:
    """Do nothing."""


@attrs.frozen(kw_only=True, eq=False)
class Entry:
    """One call of a run's methods, as trackers write it.

    What `value` is follows from `kind`:

    - `params`: hyperparameters by name: None, bool, int, float or text;
    - `log`: numbers by name;
    - `text`: text;
    - `image`: a uint8 tensor on the CPU, of shape (height, width, channels), 1, 3 or 4 channels;
    - `table`: `{"columns": names, "rows": lists}` of plain values;
    - `artifact`: the absolute path of a file or folder.

    Attributes:
        kind: The method; `params` is logged when a run is opened.
        name: The name that was passed; empty for params and log.
        value: What was logged.
        step: Optimizer updates.
        rows: Rows consumed since the start of the run, if known.
        epoch: Pass over the data, if known.
        time: Seconds since 1970.
    """

    kind: str
    name: str = ""
    value: Any
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
        name: Display name.
        folder: Folder of the run, on this machine; of ranks other than 0, a folder in it.
        rank: The rank that tracks.
        group: The id of the run of rank 0 if all ranks track; otherwise None.
        identity: The tracker's own `identity` from when the run was opened before; empty for a new
            run.
        position: Where the run resumes; everything logged after it will be logged again.
        params: Hyperparameters by name: the plan, the context, the settings.
    """

    id: str
    name: str
    folder: Path
    rank: int = 0
    group: str | None = None
    identity: str = ""
    position: Position = attrs.field(factory=Position)
    params: Mapping[str, Any]

    @property
    def resumed(self) -> bool:
        """Whether the tracker has opened this run before."""
        return bool(self.identity)


@attrs.frozen(kw_only=True)
class Tracker:
    """How one kind of tracker logs: functions only, no state.

    `open` is called in the caller's thread; all others by one background thread, in the order of
    the calls. What they raise is reported once, and training continues. Change a function with
    `attrs.evolve(tracker, write=my_write)`.

    Attributes:
        name: Shown in messages.
        config: The config type that selects this tracker; None for one that is passed to `fx.track`
            directly.
        package: The package that it imports; empty if it needs none.
        kinds: The kinds of entries that it writes; the first call that logs another one is
            reported. Params are not.
        open: (config, Start) → the library's own object for this run, or any other value: `native`.
        write: (native, Entry) → None.
        flush: (native) → None.
        close: (native, failed) → None; `failed` if an exception ended the run.
        identity: (native) → the library's id of this run, passed to `open` when it is resumed.
        refuses: (name) → why the library does not accept this name of a metric, image, ...; empty
            if it does.
        last_steps: (native, Start) → by name, the last step that the library has of a resumed run,
            if it cannot remove entries. Entries up to that step are not written again. Called once,
            before anything is written; names with nothing after `Start.position` may be missing.
        closed_by_caller: Call `close` in the thread that closes the run, for libraries that change
            signal handlers, which only the main thread may do.
    """

    name: str
    config: type | None = None
    package: str = ""
    kinds: tuple[str, ...] = KINDS
    open: Callable[[Any, Start], Any] = _nothing
    write: Callable[[Any, Entry], None]
    flush: Callable[[Any], None] = _nothing
    close: Callable[[Any, bool], None] = _nothing
    identity: Callable[[Any], str] = lambda native: "same"
    refuses: Callable[[str], str] = lambda name: ""
    last_steps: Callable[[Any, Start], Mapping[str, int]] = lambda native, start: {}
    closed_by_caller: bool = False


# What a run is logged to: a tracker's config, its kind, such as "wandb", or a tracker.
Target = Config | Tracker | str


def array(image: Tensor) -> Any:
    """A NumPy array of shape (height, width, channels), or (height, width) if it is gray."""
    return (image[..., 0] if image.shape[-1] == 1 else image).numpy()


def picture(config: type, image: Tensor) -> Any:
    """A `PIL.Image`."""
    return library(config, "PIL.Image").fromarray(array(image))
