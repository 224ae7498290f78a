"""One process: rows of tokens from 10^8, and a start with 10^7 documents.

python -m benchmarks.tokens
"""

import itertools
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import fxtrain as fx
from benchmarks._common import interleaved, show

TOKENS, DOCUMENTS, LENGTH, ROWS = 10**8, 10**7, 2048, 8


def _write(folder):
    rng = np.random.default_rng(1)
    rng.integers(1, 50_000, TOKENS, dtype=np.uint16).tofile(folder / "a.bin")
    size, n = TOKENS // DOCUMENTS, DOCUMENTS
    index = folder / "a.idx"
    index.write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, n, n + 1))
    with index.open("ab") as file:
        np.full(n, size, np.int32).tofile(file)
        (np.arange(n, dtype=np.int64) * 2 * size).tofile(file)
        np.arange(n + 1, dtype=np.int64).tofile(file)


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, fx.detect({}, device="cpu") as ctx:
        folder = Path(name)
        _write(folder)
        sources = {
            "nanoGPT, one document": fx.NanoGPTTokens(path=str(folder / "a.bin")),
            f"Megatron, documents of {TOKENS // DOCUMENTS}": fx.MegatronTokens(
                path=str(folder / "a")
            ),
        }
        runs, starts = {}, []
        for label, source in sources.items():
            started = time.perf_counter()
            loader = fx.tokens(source, ctx, length=LENGTH, batch_size=ROWS)
            batches = itertools.chain.from_iterable(loader.epochs(1 << 30))
            next(batches)
            starts.append([label, f"{1e3 * (time.perf_counter() - started):.1f}"])
            runs[label] = lambda batches=batches: next(batches)
        mapped = np.memmap(folder / "a.bin", dtype=np.uint16, mode="r")
        rng = np.random.default_rng(2)

        def copy():
            rows = rng.integers(0, TOKENS // LENGTH, ROWS) * LENGTH
            return torch.stack(
                [torch.from_numpy(mapped[row : row + LENGTH].astype(np.int64)) for row in rows]
            )

        runs["copied from the map, tokens only"] = copy
        times = interleaved(runs, rounds=100, each=1)
        base = times["copied from the map, tokens only"]
        rows = [[label, f"{1e3 * t:.2f}", f"{t / base:.1f}"] for label, t in times.items()]
        show(f"A batch of {ROWS} rows of {LENGTH}", ["source", "ms", "ratio"], rows)
        show("Start with a first batch", ["source", "ms"], starts)


if __name__ == "__main__":
    main()
