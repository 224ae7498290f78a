"""One process: rows of tokens from 10^9, and a start with 10^8 documents.

The copies are the least that a loop by hand does: each row of the map is written into an int64
array, of which a tensor is made. A batch has tokens and labels; with documents kept apart, also
positions and documents, which no copy has.

python -m benchmarks.tokens
"""

import itertools
import os
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import fxtrain as fx
from benchmarks._common import interleaved, show
from fxtrain.token_files.rows import pack_documents

TOKENS, DOCUMENTS, LENGTH, ROWS = 10**9, 10**8, 2048, 8
BLOCK = 10**7  # entries written at a time


def _write(folder):
    """4 GB: random tokens, and an index of documents of equal size."""
    rng = np.random.default_rng(1)
    with (folder / "a.bin").open("wb") as file:
        for _ in range(0, TOKENS, BLOCK):
            rng.integers(1, 50_000, BLOCK, dtype=np.uint16).tofile(file)
    size, n = TOKENS // DOCUMENTS, DOCUMENTS
    with (folder / "a.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n, n + 1))
        for _ in range(0, n, BLOCK):
            np.full(BLOCK, size, np.int32).tofile(file)
        for factor, stop in ((2 * size, n), (1, n + 1)):
            for begin in range(0, stop, BLOCK):
                (np.arange(begin, min(begin + BLOCK, stop)) * factor).tofile(file)
    os.sync()  # a start does not wait for these writes


def _plan_windows():
    """Documents packed in a second, of log-normal lengths."""
    rng, rows = np.random.default_rng(0), []
    for length, window in ((2048, 4096), (8192, 4096), (32768, 1024)):
        total = length * window
        sizes = np.clip(np.exp(rng.normal(6.2, 1.1, total // 300)), 8, 200_000).astype(np.int64)
        borders = np.concatenate([[0], sizes.cumsum()])
        borders = np.append(borders[borders < total], total)
        times = interleaved(
            {"pack": lambda b=borders, n=length: pack_documents(b, n, last=False)}, rounds=9, each=1
        )
        needlessly = pack_documents(borders, length, last=False).cut
        documents = len(borders) - 1
        short = (np.diff(borders) <= length).sum()
        # A document is cut by concatenation where it is in two rows.
        first, final = borders[:-1] // length, (borders[1:] - 1) // length
        cut = ((first != final) & (np.diff(borders) <= length)).sum()
        speed = f"{documents / times['pack'] / 1e3:.0f} k"
        shares = f"{needlessly / short:.2%}", f"{cut / short:.1%}"
        rows.append([f"{window} rows of {length}", str(documents), speed, *shares])
    heads = ["window", "documents", "documents/s", "cut needlessly", "cut by concatenation"]
    show("Best fit", heads, rows)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, fx.detect({}, device="cpu") as ctx:
        folder = Path(name)
        _write(folder)
        nanogpt = fx.data.NanoGPTTokens(path=str(folder / "a.bin"))
        megatron = fx.data.MegatronTokens(path=str(folder / "a"))
        apart = f"Megatron, documents of {TOKENS // DOCUMENTS} kept apart"
        sources = {
            "nanoGPT": (nanogpt, False),
            "Megatron": (megatron, False),
            apart: (megatron, True),
        }
        runs, starts = {}, []
        for label, (source, documents) in sources.items():
            started, busy = time.perf_counter(), time.process_time()
            loader = fx.tokens(source, ctx, length=LENGTH, batch_size=ROWS, documents=documents)
            batches = itertools.chain.from_iterable(loader.epochs(1 << 30))
            next(batches)
            wall, busy = time.perf_counter() - started, time.process_time() - busy
            starts.append([label, f"{1e3 * wall:.1f}", f"{1e3 * busy:.1f}"])
            runs[label] = lambda batches=batches: next(batches)
        half = fx.data.NanoGPTTokens(path=str(folder / "a.bin"), end=1)
        parts = [
            fx.data.BlendPart(name=name, source=one, weight=weight)
            for name, one, weight in (("a", nanogpt, 0.7), ("b", half, 0.3))
        ]
        settings = {"length": LENGTH, "batch_size": ROWS}
        blend = iter(fx.tokens(fx.data.Blend(parts=parts), ctx, **settings))
        runs["blend of two nanoGPT files"] = lambda: next(blend)
        best = fx.tokens(half, ctx, packing=fx.data.BestFit(), **settings)
        packed = itertools.chain.from_iterable(best.epochs(1 << 30))
        for _ in range(100):  # plans the windows
            next(packed)
        runs["nanoGPT, best fit, planned"] = lambda: next(packed)
        mapped = np.memmap(folder / "a.bin", dtype=np.uint16, mode="r")
        rng = np.random.default_rng(2)

        def copy(parts):
            """Tokens of random rows from the map, and those one place later: int64."""
            copies = np.empty((parts, ROWS, LENGTH), np.int64)
            rows = rng.integers(0, TOKENS // LENGTH - 1, ROWS) * LENGTH
            for number, row in enumerate(rows.tolist()):
                for part in range(parts):
                    copies[part, number] = mapped[row + part : row + part + LENGTH]
            return torch.from_numpy(copies)

        base = "copied from the map, tokens and labels"
        runs[base] = lambda: copy(2)
        runs["copied from the map, tokens only"] = lambda: copy(1)
        times = interleaved(runs, rounds=500, each=4)
        rows = [[label, f"{1e6 * t:.0f}", f"{t / times[base]:.2f}"] for label, t in times.items()]
        show(f"A batch of {ROWS} rows of {LENGTH}", ["source", "us", "ratio"], rows)
        show("Start with a first batch", ["source", "ms", "ms of the CPU"], starts)
    _plan_windows()


if __name__ == "__main__":
    main()
