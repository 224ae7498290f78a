"""Python's own documentation and sources, as files of tokens in Megatron's format.

    python examples/pretrain/prepare.py --to data

Two sources come from the standard library on disk: its documentation (the manual and all
docstrings) and its code. Of each, every 20th document is held out. A byte-level BPE is trained on
both, and `fx.data.tokenize` writes `docs`, `code`, `docs_held_out` and `code_held_out`. Ends with
one JSON line: the tokens of each.
"""

import argparse
import ast
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import fxtrain as fx

END = "<|endoftext|>"
DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(most: int) -> list[str]:
    """The text of the library's modules, without its tests and what is installed beside it."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    paths = [path for path in library.rglob("*.py") if not skipped & {*path.parts}]
    return [path.read_text(encoding="utf-8") for path in sorted(paths)[:most]]


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
            yield text


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=Path("data"))
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--modules", type=int, default=1 << 20, help="use the first N only")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args()
    folder: Path = options.to
    folder.mkdir(parents=True, exist_ok=True)
    code = sources(options.modules)
    docs = [*topics.values(), *(text for source in code for text in docstrings(source))]
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():  # started again, it continues
        train_tokenizer(docs + code, options.vocabulary).save(str(tokenizer))
    counts = {}
    for name, texts in (("docs", docs), ("code", code)):
        held_out = texts[::20]
        kept = [text for number, text in enumerate(texts) if number % 20]
        for part, documents in ((name, kept), (f"{name}_held_out", held_out)):
            lines = folder / f"{part}.jsonl"
            if not lines.exists():
                lines.write_text("".join(f"{json.dumps({'text': text})}\n" for text in documents))
            fx.data.tokenize(lines, folder / part, tokenizer, end=END, workers=options.workers)
            counts[part] = json.loads((folder / f"{part}.json").read_text())["tokens"]
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
