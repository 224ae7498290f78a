"""`fxtrain tokens`: text to files of tokens."""

import os
import time
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fxtrain._display import counted
from fxtrain.cli.output import COUNT, as_json, option, print_json, say, warn
from fxtrain.data.tokenizing import Progress, Tokenizing, tokenize_parts

_LINE_EVERY_S = 10.0
_TYPES = click.Choice(["uint16", "int32", "uint32", "int64"])


@click.command("tokens")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@option("--to", "write PATH.bin, and PATH.idx for Megatron", metavar="PATH", required=True)
@option(
    "--tokenizer", "a tokenizer.json, or a folder of transformers", metavar="PATH", required=True
)
@option("--format", "what to write", click.Choice(["megatron", "nanogpt"]), default="megatron")
@option("--column", "field or column with the text", str, "NAME", default="text")
@option("--end", "token after each document, as '<|endoftext|>'", str, "TOKEN")
@option("--dtype", "type of a token; by default the smallest", _TYPES)
@option("--workers", "processes", COUNT, default=os.cpu_count() or 1, show_default="all cores")
@as_json
def TOKENS(
    inputs: tuple[str, ...],
    to: str,
    tokenizer: str,
    format: Any,
    column: str,
    end: str | None,
    dtype: Any,
    workers: int,
    json_: bool,  # noqa: FBT001
) -> None:
    """Tokenize text for fx.tokens.

    INPUT is a file or a quoted pattern. JSON lines (.jsonl, .json, also with .gz) have a document
    per line, .parquet files one per row; every other file is one document. The output appears when
    it is complete. After a kill, the same command continues.
    """
    job = Tokenizing(
        inputs=inputs,
        output=to,
        tokenizer=tokenizer,
        format=format,
        field=column,
        end=end,
        dtype=dtype,
        workers=workers,
    )
    last = None
    for progress in _shown(tokenize_parts(job)):
        last = progress
    if json_ and last is not None:
        counts = {"documents": last.documents, "tokens": last.tokens, "empty": last.empty}
        print_json({"wrote": job.last_file, **counts})
    elif json_:
        print_json({"wrote": None})
    elif last is None:
        say(f"{job.last_file} is complete already.")
    else:
        say(f"Wrote {job.last_file}: {_counts(last)}.")


def _counts(progress: Progress) -> str:
    text = f"{counted(progress.documents, 'document')}, {counted(progress.tokens, 'token')}"
    empty = counted(progress.empty, "empty document")
    return f"{text}; {empty} left out" if progress.empty else text


def _shown(parts: Iterator[Progress]) -> Iterator[Progress]:
    """The same, with a bar in a terminal, else a line now and then."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = DownloadColumn(), TimeRemainingColumn(), TextColumn("{task.fields[counts]}")
        with Bar(BarColumn(), *columns, console=console) as bar:
            task = bar.add_task("tokens", total=None, counts="")
            for part in parts:
                bar.update(task, total=part.total, completed=part.done, counts=_counts(part))
                yield part
        return
    shown_s = time.monotonic()
    for part in parts:
        if time.monotonic() - shown_s >= _LINE_EVERY_S:
            shown_s = time.monotonic()
            warn(f"{part.done / part.total:.1%}: {_counts(part)}")
        yield part
