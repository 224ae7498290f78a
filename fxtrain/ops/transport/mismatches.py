"""Error messages for failed collectives, with what each rank saw."""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxtrain._errors import CollectiveError, ContextError
from fxtrain.state import DistContext, check_connected

__all__ = [
    "by_rank",
    "call_site",
    "check_is_context",
    "check_source_rank",
    "lost_rank_error",
    "mismatch_error",
    "unusable_message",
]

_HERE = str(Path(__file__).resolve().parents[2])
_POLL_INTERVAL_S = 0.05


def check_is_context(op: str, ctx: object) -> None:
    """Refuse anything but a context: value and context are easily swapped."""
    if not isinstance(ctx, DistContext):
        raise ContextError(
            f"{op}: ctx is a {type(ctx).__name__}, not a context. Pass the value first, then the "
            f"context: ops.gather(tree, ctx), with ctx = fx.detect()."
        )
    if ctx.comm.state.closed:
        check_connected(op, ctx)


def check_source_rank(op: str, src: int, ctx: DistContext) -> None:
    """Refuse a source that is not a rank of the context."""
    if not 0 <= src < ctx.world_size:
        raise CollectiveError(
            f"{op}(src={src}): no such rank. This context has ranks 0 to {ctx.world_size - 1}."
        )


def call_site() -> str:
    """File and line of the nearest caller outside fxtrain."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and _is_fxtrain_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_fxtrain_file(filename: str) -> bool:
    return filename.startswith((_HERE, "<attrs", "<frozen")) or "contextlib" in filename


def mismatch_error(ctx: DistContext, texts: list[str]) -> CollectiveError:
    """The error for ranks that made different calls.

    Args:
        texts: By rank, the op, its arguments and the call site, one per line.
    """
    views = [text.split("\n") for text in texts]
    names = {view[0] for view in views}
    if len(names) > 1:
        summary = "the ranks called different collectives"
        advice = (
            "Every rank must make the same calls in the same order: look for a call inside "
            "an `if` that only some ranks enter, or for loops of different lengths."
        )
    else:
        summary = f"{names.pop()}: the ranks passed different values"
        advice = (
            "Every rank must pass the same structure, dtypes and shapes. Pad ragged tensors "
            "with ops.pad first, or send them with ops.gather_objects."
        )
    shown = [f"{op}({args}) at {site}" for op, args, site in (_parse_view(v) for v in views)]
    lines = by_rank(enumerate(shown))
    return CollectiveError("\n".join([f"{summary} ({_where(ctx)}).", *lines, advice]), code="FX301")


def _parse_view(view: list[str]) -> tuple[str, str, str]:
    padded = [*view, "", ""]
    return padded[0], padded[1], padded[2] or "(truncated)"


def lost_rank_error(
    ctx: DistContext, call: tuple[str, ...], site: str, waited_s: float, error: BaseException
) -> CollectiveError:
    """The error for a rank that never joined or left; informs the other ranks.

    Effects:
        Marks the communicator as broken. Writes this rank's view to the store and reads
        those of the others, for two seconds at most.
    """
    op, args = call[0], call[1]
    torch_says = str(error).strip().splitlines() or [type(error).__name__]
    view = {"op": op, "site": site, "waited_s": round(waited_s, 1)}
    views, words = _ask_others(ctx, view)
    waiting = [
        (rank, f"waited {seen['waited_s']:g} s in {seen['op']} at {seen['site']}")
        for rank, seen in sorted(views.items())
    ]
    gone = [(rank, f"left with {word}") for rank, word in sorted(words.items()) if word]
    gone += [(rank, "left") for rank, word in sorted(words.items()) if not word]
    known = views.keys() | words.keys()
    ended = "timed out" if waited_s >= 0.9 * ctx.comm.timeout_s else "failed"
    never = f"never joined this {op} ({ended} after {waited_s:.3g} s)"
    silent = [(rank, never) for rank in range(ctx.world_size) if rank not in known]
    message = "\n".join(
        [
            f"{op}({args}) at {site} did not complete ({_where(ctx)}, "
            f"timeout {ctx.comm.timeout_s:g} s).",
            *by_rank(waiting + gone + silent),
            f"torch says: {torch_says[0]}",
            "Check the ranks that never joined: they failed, are still busy, or skipped "
            "this call. If a rank is only slow, raise detect(timeout_s=...).",
        ]
    )
    ctx.comm.state.failure = message
    return CollectiveError(message, code="FX302")


def unusable_message(ctx: DistContext) -> str:
    """The message for any call on a communicator that an earlier failure broke."""
    return (
        f"An earlier call broke this communicator. Close the context and open a new one. "
        f"The earlier error:\n{ctx.comm.state.failure}"
    )


def _ask_others(
    ctx: DistContext, view: dict[str, Any]
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """Views of the ranks that failed in this communicator, and exit messages of those gone."""
    comm = ctx.comm
    views, words = {ctx.rank: view}, {}
    if comm.store is None:
        return views, words
    deadline = time.monotonic() + min(2.0, comm.timeout_s / 2)
    try:
        comm.store.set(f"{comm.name}/lost/{ctx.rank}", json.dumps(view))
        while time.monotonic() < deadline and len(views) + len(words) < ctx.world_size:
            for rank in set(range(ctx.world_size)) - views.keys() - words.keys():
                lost_key, left_key = f"{comm.name}/lost/{rank}", f"world/left/{comm.ranks[rank]}"
                if comm.store.check([lost_key]):
                    views[rank] = json.loads(comm.store.get(lost_key))
                elif comm.store.check([left_key]):
                    words[rank] = comm.store.get(left_key).decode()
            time.sleep(_POLL_INTERVAL_S)
    except RuntimeError:
        words[0] = words.get(0) or "its store, so the other ranks cannot be queried"
        words = {rank: word for rank, word in words.items() if rank not in views}
    return views, words


def by_rank(entries: Iterable[tuple[int, str]]) -> list[str]:
    """One line per view, listing the ranks that share it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in entries:
        ranks.setdefault(text, []).append(rank)
    return [
        f"  rank{'s' * (len(who) > 1)} {_ranges(who)}: {text}"
        for text, who in sorted(ranks.items(), key=lambda item: item[1])
    ]


def _ranges(ranks: list[int]) -> str:
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
