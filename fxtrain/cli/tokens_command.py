"""`fxtrain tokens`: text to files of tokens, and what such files hold."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fxtrain._display import counted
from fxtrain.cli.output import COUNT, as_json, option, print_text, report, warn
from fxtrain.cli.tables import print_table

_LINE_EVERY_S = 10.0
_BAR = 40  # characters of the longest bar of a histogram
_TYPES = click.Choice(["uint16", "int32", "uint32", "int64"])


@click.command("tokens")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@option("--to", "write PATH.bin, and PATH.idx for Megatron", metavar="PATH")
@option("--tokenizer", "a tokenizer.json, or a folder of transformers", metavar="PATH")
@option("--format", "what to write", click.Choice(["megatron", "nanogpt"]), default="megatron")
@option("--column", "field or column with the text (text), or the tokens (--show)", str, "NAME")
@option("--end", "token after each document, as '<|endoftext|>'; its number (--show)", str, "TOKEN")
@option("--dtype", "type of a token; by default the smallest, or that of the file (--show)", _TYPES)
@option("--workers", "processes", COUNT, default=os.cpu_count() or 1, show_default="all cores")
@option("--show", "show what files of tokens hold", is_flag=True)
@option("--length", "with --show: padding and cut documents in rows of N tokens", COUNT, "N")
@as_json
def TOKENS(
    inputs: tuple[str, ...],
    to: str | None,
    tokenizer: str | None,
    format: Any,
    column: str | None,
    end: str | None,
    dtype: Any,
    workers: int,
    show: bool,  # noqa: FBT001
    length: int | None,
) -> None:
    """Tokenize text for fx.tokens, or show what files of tokens hold.

    INPUT is a file or a quoted pattern. JSON lines (.jsonl, .json, also with .gz) have a document
    per line, .parquet files one per row; every other file is one document. The output appears when
    it is complete. After a kill, the same command continues.

    With --show, INPUT is a source of fx.tokens: the path of Megatron's files, a .bin, .ds, .npy,
    .parquet or .arrow file, or a folder of them or of MDS shards.
    """
    if show:
        _show(inputs, column, end, dtype, length, tokenizer)
        return
    if to is None or tokenizer is None:
        raise click.UsageError("Pass --to and --tokenizer, or --show to look at a file.")
    if length is not None:
        raise click.UsageError("--length needs --show: rows are cut when they are read.")
    from fxtrain.token_files.tokenizing import tokenize

    counts: list[int] = []
    with _progress(counts) as show_progress:
        source = tokenize(
            inputs,
            to,
            tokenizer,
            format=format,
            field=column or "text",
            end=end,
            dtype=dtype,
            workers=workers,
            progress=show_progress,
        )
    wrote = f"{source.path}.idx" if format == "megatron" else source.path
    if not counts:
        report({"wrote": None}, f"{wrote} is complete already.")
        return
    named = dict(zip(("documents", "tokens", "empty"), counts, strict=True))
    report({"wrote": wrote, **named}, f"Wrote {wrote}: {_text_of(*counts)}.")


def _text_of(documents: int, tokens: int, empty: int) -> str:
    text = f"{counted(documents, 'document')}, {counted(tokens, 'token')}"
    return f"{text}; {counted(empty, 'empty document')} left out" if empty else text


@contextmanager
def _progress(latest: list[int]) -> Iterator[Callable[..., None]]:
    """What shows the counts after each part: a bar in a terminal, else a line now and then."""
    console, shown_s = Console(stderr=True), time.monotonic()

    def print_line(done: int, total: int, *counts: int) -> None:
        nonlocal shown_s
        latest[:] = counts
        if time.monotonic() - shown_s >= _LINE_EVERY_S:
            shown_s = time.monotonic()
            warn(f"{done / total:.1%}: {_text_of(*counts)}")

    if not console.is_terminal:
        yield print_line
        return
    columns = DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[counts]}")
    with Progress(BarColumn(), *columns, console=console) as bar:
        task = bar.add_task("tokens", total=None, counts="")

        def update(done: int, total: int, *counts: int) -> None:
            latest[:] = counts
            bar.update(task, total=total, completed=done, counts=_text_of(*counts))

        yield update


def _show(
    inputs: tuple[str, ...],
    column: str | None,
    end: str | None,
    dtype: Any,
    length: int | None,
    tokenizer: str | None,
) -> None:
    if end is not None and not end.isdecimal():
        raise click.BadParameter(f"with --show, {end!r} is no number.", param_hint="'--end'")
    from fxtrain.token_files.summary import decoded, find_source, summarize

    summaries: list[dict[str, Any]] = []
    for path in inputs:
        source = find_source(path, column, dtype, None if end is None else int(end))
        summary = {"path": path, "format": type(source).__name__, **summarize(source, length)}
        if tokenizer is not None:
            summary["sample"] = decoded(tokenizer, path, summary["sample"])
        summaries.append(summary)
    report(summaries, lambda: _print(summaries))


def _print(summaries: list[dict[str, Any]]) -> None:
    for summary in summaries:
        lengths = summary.pop("lengths")
        rows = [(name.replace("_", " "), _text(value)) for name, value in summary.items()]
        print_table(("", ""), rows)
        most = max(lengths.values())
        bars = [(name, f"{n:,}", "#" * -(-_BAR * n // most)) for name, n in lengths.items()]
        print_text("")
        print_table((">Tokens", ">Documents", ""), bars)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3%}"
    return f"{value:,}" if isinstance(value, int) else str(value)
