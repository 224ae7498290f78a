"""Tokenizers of a few words, and files of text."""

import gzip
import itertools
import json

import numpy as np
import tokenizers

from fxtrain.token_files.folders import open_tokens, source_states

WORDS = {"<end>": 0, "a": 1, "b": 2, "c": 3, "d": 4}


def write_tokenizer(folder, words=WORDS, name="tokenizer.json"):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
    tokenizer.save(str(folder / name))
    return folder / name


def write_lines(path, texts, field="text"):
    lines = "".join(json.dumps({"number": n, field: text}) + "\n" for n, text in enumerate(texts))
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def tokens_of(text, *end, words=WORDS):
    return [*(words[word] for word in text.split()), *end]


def documents_of(source):
    """The documents of a file of tokens, as lists."""
    file = open_tokens(source, source_states(source))
    _, starts = file.starts(np.array([0]), file.size)
    flat = file.gather(np.array([0]), np.array([file.size])).tolist()
    stops = [*starts[1:].tolist(), file.size]
    return [flat[start:stop] for start, stop in zip(starts.tolist(), stops, strict=True)]


class Stopped(Exception):
    """Ends a call of `fx.data.tokenize` in the middle."""


def stop_after(parts):
    """For `fx.data.tokenize(progress=...)`: ends it after so many parts."""
    left = itertools.count(parts - 1, -1)

    def stop(*_):
        if next(left) <= 0:
            raise Stopped

    return stop
