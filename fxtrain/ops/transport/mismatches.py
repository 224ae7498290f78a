"""Error messages for failed collectives, with what each rank saw."""

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fxtrain.errors import CollectiveError, FxError
from fxtrain.ops.closing import answered, read_views
from fxtrain.ops.rendezvous_store import first_line
from fxtrain.state import DistContext

_HERE = str(Path(__file__).resolve().parents[2])
# At most two seconds pass between the timeout and the exit of the process.
_STORE_REPLY_S = 1.0  # for the store to reply at all
_OTHER_RANKS_S = 1.75  # for the other ranks to fail too, and to write where they waited
_LAST_REPLY_S = 0.15


def check_source_rank(op: str, src: int, ctx: DistContext) -> None:
    """Refuse a source that is not a rank of the context."""
    if not 0 <= src < ctx.world_size:
        raise CollectiveError(
            f"{op}(src={src}): no such rank. This context has ranks 0 to {ctx.world_size - 1}."
        )


# The nearest call from outside fxtrain: the function of fxtrain, and the file and line.
CallSite = tuple[str, str]


def call_site(op: str) -> CallSite:
    """The nearest call from outside fxtrain, which led to a collective."""
    frame: Any = sys._getframe(1)  # noqa: TID251 - for messages
    function = ""
    while frame.f_back is not None and _is_fxtrain_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_HERE):
            function = frame.f_code.co_qualname
        frame = frame.f_back
    # The functions that decorators make have no name that a user knows.
    named = op if not function or "<" in function else function
    return named, f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _described(op: str, args: str, site: CallSite) -> str:
    """A collective, in words: that of the function which was called, if it has another name."""
    function, line = site
    if function == op:
        return f"{op}({args}) at {line}"
    return f"{function} at {line}, which calls {op}({args})"


def _is_fxtrain_file(filename: str) -> bool:
    return filename.startswith((_HERE, "<attrs", "<frozen")) or "contextlib" in filename


def mismatch_text(call: tuple[str, ...], site: CallSite) -> str:
    """What a rank sends the others about its call, for `mismatch_error`: the longest part last."""
    return "\n".join([call[0], *site, " ".join(call[1:])])


def mismatch_error(ctx: DistContext, texts: list[str]) -> CollectiveError:
    """The error for ranks that made different calls.

    Args:
        texts: By rank, what `mismatch_text` gives.
    """
    views = [(text.split("\n", 3) + [""] * 3)[:4] for text in texts]
    names = {op for op, *_ in views}
    if len(names) > 1:
        summary = "the ranks called different collectives"
        advice = (
            "Every rank must make the same calls in the same order: look for a call inside "
            "an `if` that only some ranks enter, or for loops of different lengths."
        )
    else:
        functions = {function for _, function, *_ in views}
        name = functions.pop() if len(functions) == 1 else names.pop()
        summary = f"{name}: the ranks passed different values"
        advice = (
            "Every rank must pass the same structure, dtypes and shapes. Pad ragged tensors "
            "with ops.pad first, or send them with ops.gather_objects."
        )
    shown = [_described(op, args, (function, line)) for op, function, line, args in views]
    lines = by_rank(enumerate(shown))
    return CollectiveError("\n".join([f"{summary} ({_where(ctx)}).", *lines, advice]), code="FX301")


def deferred_mismatch_error(ctx: DistContext, texts: list[str]) -> CollectiveError:
    """The error for ranks that made different calls, some of which did not wait for the others.

    Args:
        texts: By rank, what its packet says of the call.
    """
    lines = by_rank(enumerate(texts))
    return CollectiveError(
        "\n".join(
            [
                f"the ranks called different collectives ({_where(ctx)}).",
                *lines,
                "Every rank must make the same calls in the same order, and as many updates since "
                "the previous call: look for a call inside an `if` that only some ranks enter, or "
                "for loops of different lengths.",
            ]
        ),
        code="FX301",
    )


def lost_rank_error(
    ctx: DistContext,
    call: tuple[str, ...],
    site: CallSite,
    waited_s: float | None,
    error: BaseException,
) -> CollectiveError:
    """The error for a rank that never joined or left; informs the other ranks.

    Args:
        waited_s: Since the call began; None if that is unknown.
        error: What torch raised.

    Effects:
        Marks the communicator as broken. Writes this rank's view to the store and reads
        those of the others, for 1.9 seconds at most; for 1 if the store does not answer.
    """
    op, described = site[0], _described(call[0], call[1], site)
    spent = "" if waited_s is None else f"{round(waited_s, 1):g} s "
    views, hosts, problem = _ask_others(ctx, f"waited {spent}in {op} at {site[1]}")
    never = f"never joined this {op}"
    if waited_s is not None:
        ended = "timed out" if waited_s >= 0.9 * ctx.comm.timeout_s else "failed"
        never += f" ({ended} after {waited_s:.3g} s)"
    seen = [(rank, views.get(rank, never)) for rank in range(ctx.world_size)]
    message = "\n".join(
        [
            f"{described}{',' * (op != call[0])} did not complete ({_where(ctx)}, "
            f"timeout {ctx.comm.timeout_s:g} s).",
            *by_rank(seen, hosts),
            *([problem] if problem else []),
            f"torch says: {first_line(error)}",
            "Check the ranks that never joined: they failed, are still busy, or skipped "
            "this call. If a rank is only slow, raise detect(timeout_s=...).",
        ]
    )
    ctx.comm.state.failure = message
    return CollectiveError(message, code="FX302")


def name_lost_rank(ctx: DistContext, call: tuple[str, ...], error: RuntimeError) -> None:
    """Raise an error that names the lost rank, if that is the cause."""
    if isinstance(error, FxError) or not any(
        word in str(error) for word in ("gloo", "NCCL", "Connection closed", "ProcessGroup")
    ):
        return
    raise lost_rank_error(ctx, call, call_site(call[0]), None, error) from error


def _ask_others(ctx: DistContext, view: str) -> tuple[dict[int, str], dict[int, str], str]:
    """What the store of the run knows of the ranks of a communicator.

    Returns:
        By rank the views of those that failed in this communicator or left, and machines, where
        there are several; and why the store could not be asked.
    """
    views, hosts = {ctx.rank: view}, dict[int, str]()
    store, name = ctx.comm.store, ctx.comm.name
    if store is None:
        return views, hosts, ""
    deadline = time.monotonic() + min(_OTHER_RANKS_S, ctx.comm.timeout_s / 2)
    keys = {
        rank: {f"{name}/lost/{rank}": "", f"world/left/{number}": "left"}
        for rank, number in enumerate(ctx.comm.ranks)
    }

    def ask() -> None:
        store.set(f"{name}/lost/{ctx.rank}", view)
        hosts.update(_hosts(ctx))

    known = answered(_STORE_REPLY_S, ask)
    left_s = max(0.0, deadline - time.monotonic()) + _LAST_REPLY_S
    known = known and answered(left_s, lambda: read_views(store, keys, views, deadline))
    # A thread that still waits may write later.
    return {**views}, {**hosts}, "" if known else _NO_STORE


_NO_STORE = (
    "The store of this run does not answer, so the other ranks could not be asked: the process "
    "that serves it (that of rank 0, or the launcher of the main node) ended, or this machine "
    "has lost its connection to it."
)


def _hosts(ctx: DistContext) -> dict[int, str]:
    """The machine of each rank; empty beside a process group that `detect` did not open."""
    # Asked on one machine too: writing to a store that is gone is no error.
    keys = [f"host/{rank}" for rank in ctx.comm.ranks]
    if not ctx.comm.store.check(keys) or ctx.num_nodes == 1:
        return {}
    return {rank: name.decode() for rank, name in enumerate(ctx.comm.store.multi_get(keys))}


def by_rank(
    entries: Iterable[tuple[int, str]], hosts: Mapping[int, str] | None = None
) -> list[str]:
    """One line per view, listing the ranks that share it, and their machines if there are many."""
    ranks: dict[str, list[int]] = {}
    for rank, text in entries:
        ranks.setdefault(text, []).append(rank)
    return [
        f"  {ranks_on(who, hosts or {})}: {text}"
        for text, who in sorted(ranks.items(), key=lambda item: item[1])
    ]


def ranks_on(ranks: list[int], hosts: Mapping[int, str]) -> str:
    """Ranks in words, with their machines if those are known.

    Example:
        >>> ranks_on([0, 1, 3], {0: "n0", 1: "n0", 3: "n1"})
        'ranks 0-1, 3 on n0, n1'
    """
    names = [*dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts)]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    where = f" on {', '.join(names[:4])}{more}" if names else ""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"


def ranges(ranks: list[int]) -> str:
    """Ranks in short form, such as 0-2, 5."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _where(ctx: DistContext) -> str:
    axis = "" if ctx.comm.name == "world" else f"axis {ctx.comm.name}, "
    return f"{axis}{ctx.world_size} ranks"
