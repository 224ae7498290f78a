"""`fx.data.tokenize` against a loop by hand over tokenizers, on the same processes.

The text is Python's standard library, as JSON lines; the tokenizer a BPE trained on it. By hand,
each process of a pool reads its lines, tokenizes them as fxtrain does, and returns an array; the
first process writes all of them. Both start their processes once, which is part of the time.

python -m benchmarks.tokenizing
"""

import itertools
import json
import multiprocessing
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

import fxtrain as fx
from benchmarks._common import show

WORKERS, ROUNDS, COPIES = 2, 5, 2


def _write(folder):
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))
    texts = [path.read_bytes().decode(errors="ignore") for path in paths]
    texts = [text for text in texts if text.strip() and "<end>" not in text]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    lines = folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) * COPIES)
    return lines, folder / "tokenizer.json"


def _tokens(path, tokenizer, begin, stop):
    """The tokens of the lines of a part."""
    found = tokenizers.Tokenizer.from_file(str(tokenizer))
    arrays = []
    with open(path, "rb") as file:
        file.seek(begin)
        while file.tell() < stop and (line := file.readline()):
            text = json.loads(line)["text"]
            (encoded,) = found.encode_batch_fast([text], add_special_tokens=False)
            arrays.append(np.array([*encoded.ids, 0], np.uint16))
    return np.concatenate(arrays)


def _by_hand(lines, tokenizer, output):
    bounds, at = [0], 0
    with lines.open("rb") as file:
        for line in file:
            at += len(line)
            if at - bounds[-1] >= 1 << 20:
                bounds.append(at)
    if bounds[-1] < at:
        bounds.append(at)
    calls = [(lines, tokenizer, *pair) for pair in itertools.pairwise(bounds)]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool, output.open("wb") as file:
        for array in pool.starmap(_tokens, calls, chunksize=1):
            file.write(array.tobytes())


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines, tokenizer = _write(folder)
        best = {"by hand": np.inf, "fx.data.tokenize": np.inf}
        for number in range(ROUNDS):
            began = time.perf_counter()
            _by_hand(lines, tokenizer, folder / "hand.bin")
            best["by hand"] = min(best["by hand"], time.perf_counter() - began)
            output, began = folder / f"{number}.bin", time.perf_counter()
            fx.data.tokenize(
                lines, output, tokenizer, format="nanogpt", end="<end>", workers=WORKERS
            )
            best["fx.data.tokenize"] = min(best["fx.data.tokenize"], time.perf_counter() - began)
            assert output.read_bytes() == (folder / "hand.bin").read_bytes()
        mib, hand = lines.stat().st_size / (1 << 20), best["by hand"]
        rows = [[name, f"{mib / s:.2f}", f"{hand / s:.2f}"] for name, s in best.items()]
        show(f"{mib:.1f} MiB of text, {WORKERS} processes", ["", "MiB/s", "speed"], rows)


if __name__ == "__main__":
    main()
