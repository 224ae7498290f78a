"""Count the lines that a script has and its raw version has not: a table in Markdown.

Start it with `python examples/coming_from/changed_lines.py`.
"""

import difflib
import sys
from pathlib import Path

TASKS = {
    "text": "fine-tuning a transformer",
    "images": "image classification",
    "digits": "handwritten digits, as MNIST",
    "accumulation": "accumulating gradients",
    "checkpoints": "checkpoints and resuming",
    "tracking": "tracking with TensorBoard",
    "early_stopping": "early stopping",
    "batch_size": "search for the largest batch size",
    "local_sgd": "Local SGD",
    "comm_hooks": "gradients in half precision",
    "profiler": "profiling",
    "fsdp": "FSDP, with the peak of memory",
    "cross_validation": "cross validation",
    "inference": "inference on several ranks",
}


def counts(task: str, library: str) -> tuple[int, int]:
    """Lines that the library's version adds or changes, and lines of the raw one that it drops."""
    folder = Path(__file__).parent / task
    raw, ported = (
        [line for line in (folder / f"{task}_{one}.py").read_text().splitlines() if line.strip()]
        for one in ("raw", library)
    )
    kinds = [line[0] for line in difflib.ndiff(raw, ported)]
    return kinds.count("+"), kinds.count("-")


def table() -> str:
    """A row per task, and one for all: lines written, and in brackets lines dropped."""
    rows = {task: [*counts(task, "accelerate"), *counts(task, "fxtrain")] for task in TASKS}
    sums = [sum(column) for column in zip(*rows.values(), strict=True)]
    told = [
        f"| {name} | {row[0]} ({row[1]}) | {row[2]} ({row[3]}) |"
        for name, row in [
            *((f"[{TASKS[task]}]({task})", row) for task, row in rows.items()),
            ("all", sums),
        ]
    ]
    return "\n".join(["| Task | Accelerate | fxtrain |", "|---|---|---|", *told])


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
