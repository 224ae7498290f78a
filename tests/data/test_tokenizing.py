"""Text to files of tokens: inputs, what is refused, and runs that stop."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fxtrain as fx
from tests._errors import raises_code
from tests.data._texts import (
    WORDS,
    Stopped,
    documents_of,
    stop_after,
    tokens_of,
    write_lines,
    write_tokenizer,
)

TEXTS = ["a b c", "d", "b b b a"]


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path)


@pytest.fixture
def small_parts(monkeypatch):
    """One line in each part."""
    monkeypatch.setattr("fxtrain.token_files.tokenizing._SMALLEST", 16)


def _files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


def test_json_lines_zipped_ones_and_text_have_the_same_tokens(tmp_path, tokenizer):
    expected = [tokens_of(text, 0) for text in TEXTS]
    write_lines(tmp_path / "in.jsonl", TEXTS)
    write_lines(tmp_path / "in.jsonl.gz", TEXTS)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    for number, inputs in enumerate(("in.jsonl", "in.jsonl.gz", "*.txt")):
        source = fx.data.tokenize(
            tmp_path / inputs, tmp_path / f"out{number}", tokenizer, end="<end>"
        )
        assert documents_of(source) == expected
    names = [path.name for path in tmp_path.glob("out0*")]
    assert sorted(names) == ["out0.bin", "out0.idx", "out0.json"]


def test_parquet_files_have_a_document_per_row(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the package pyarrow")
    table = pyarrow.table({"id": [1, 2, 3], "text": TEXTS})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    source = fx.data.tokenize(tmp_path / "in.parquet", tmp_path / "out", tokenizer)
    assert documents_of(source) == [tokens_of(text) for text in TEXTS]
    with raises_code("FX400", '"body"', "id, text"):
        fx.data.tokenize(tmp_path / "in.parquet", tmp_path / "b", tokenizer, field="body")
    null = pyarrow.table({"text": ["a", None]})
    parquet.write_table(null, tmp_path / "in.parquet")
    with raises_code("FX400", "in.parquet", "row group 0, row 1", "null"):
        fx.data.tokenize(tmp_path / "in.parquet", tmp_path / "c", tokenizer)
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    with raises_code("FX400", "in.parquet", "Parquet"):
        fx.data.tokenize(tmp_path / "in.parquet", tmp_path / "d", tokenizer)


def test_a_folder_of_transformers_gives_the_same_tokens(tmp_path, tokenizer):
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<end>")
    fast.save_pretrained(tmp_path / "folder")
    path = write_lines(tmp_path / "in.jsonl", TEXTS)
    source = fx.data.tokenize(path, tmp_path / "out", tmp_path / "folder", end="<end>")
    assert documents_of(source) == [tokens_of(text, 0) for text in TEXTS]


def test_an_end_within_a_text_is_text(tmp_path):
    words = {"<end>": 0, "a": 1, "?": 2}
    tokenizer = write_tokenizer(tmp_path, words)
    made = json.loads(tokenizer.read_text())
    made["model"]["unk_token"] = "?"
    tokenizer.write_text(json.dumps(made))
    path = write_lines(tmp_path / "in.jsonl", ["a <end>b a", "a"])
    source = fx.data.tokenize(path, tmp_path / "out", tokenizer, format="nanogpt", end="<end>")
    assert documents_of(source) == [[1, 2, 1, 0], [1, 0]]


def test_documents_without_text_are_left_out_and_counted(tmp_path, tokenizer):
    path = write_lines(tmp_path / "in.jsonl", ["a", "", " ", "b"])
    seen = []
    fx.data.tokenize(
        path, tmp_path / "out", tokenizer, end="<end>", progress=lambda *now: seen.append(now)
    )
    assert seen[-1][2:] == (2, 4, 2)
    source = fx.data.MegatronTokens(path=str(tmp_path / "out"))
    assert documents_of(source) == [[1, 0], [2, 0]]
    write_lines(path, ["", " "])
    with raises_code("FX400", "text"):
        fx.data.tokenize(path, tmp_path / "out2", tokenizer)
    assert not list(tmp_path.glob("out2.[bi]*"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"in.jsonl, line 6 is no JSON: Expecting"),
        ("[1]", r'line 6 has no field "text"; it is no object'),
        ('{"body": "a", "id": 1}', r'line 6 has no field "text"; it is an object with body, id'),
        ('{"text": null}', r'line 6 has null in "text", not text'),
        ('{"text": 3}', r'line 6 has int in "text", not text'),
        ('{"text": "\\ud800"}', r'line 6 has half a surrogate pair in "text"'),
        ('{"text": "\xff"}', r"line 6 is no JSON: 'utf-8' codec"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_broken_line_is_named(tmp_path, tokenizer, small_parts, line, message, zipped):
    lines = ['{"text": "a"}', "", *['{"text": "a b c"}'] * 3, line, '{"text": "b"}']
    path = tmp_path / ("in.jsonl.gz" if zipped else "in.jsonl")
    data = "\n".join(lines).encode("latin-1")
    path.write_bytes(gzip.compress(data) if zipped else data)
    message = message.replace("in.jsonl", path.name)
    with pytest.raises(fx.errors.DataError, match=message):
        fx.data.tokenize(path, tmp_path / "out", tokenizer)
    # What is tokenized is kept; the zipped file is one part, which is not.
    assert _files(tmp_path) == ([] if zipped else ["out.parts"])


def test_settings_may_be_corrected_before_a_part_is_complete(tmp_path, tokenizer):
    path = write_lines(tmp_path / "in.jsonl", TEXTS)
    with raises_code("FX400", '"txt"'):
        fx.data.tokenize(path, tmp_path / "out", tokenizer, field="txt")
    fx.data.tokenize(path, tmp_path / "out", tokenizer)


def test_inputs_that_cannot_be_read_are_named(tmp_path, tokenizer):
    (tmp_path / "latin.txt").write_bytes("né".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "cut.jsonl.gz").write_bytes(bytes.fromhex("1f8b0800000000000003") + b"\0")
    for name, message in {
        "none.txt": "no file .*none.txt",
        "*.none": r"no file .*\*.none",
        ".": r"is a folder. Pass a pattern of its files",
        "empty.txt": "the inputs are empty",
        "latin.txt": "latin.txt is not UTF-8 text",
        "cut.jsonl.gz": "cut.jsonl.gz cannot be unzipped after line 0",
    }.items():
        with pytest.raises(fx.errors.DataError, match=message):
            fx.data.tokenize(tmp_path / name, tmp_path / "out", tokenizer)
        for made in tmp_path.glob("out.parts/*"):
            made.unlink()


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, tokenizer):
    path = write_lines(tmp_path / "in.jsonl", TEXTS)
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "folder").mkdir()
    large = write_tokenizer(tmp_path, WORDS | {"z": 70_000}, "large.json")
    for name, settings, message in (
        ("none.json", {}, "no tokenizer at"),
        ("broken.json", {}, "is no tokenizer.json"),
        ("folder", {}, "is no folder of a tokenizer"),
        ("tokenizer.json", {"end": "<stop>"}, "has no token '<stop>' to end documents"),
        ("tokenizer.json", {"dtype": "uint32"}, "Megatron's format has no uint32"),
        ("large.json", {"dtype": "uint16"}, "numbers up to 70000, more than uint16 holds"),
    ):
        with pytest.raises(fx.errors.DataError, match=message):
            fx.data.tokenize(path, tmp_path / "out", tmp_path / name, **settings)
    assert not _files(tmp_path)
    for format, dtype in (("megatron", "int32"), ("nanogpt", "uint32")):
        fx.data.tokenize(path, tmp_path / format, large, format=format)
        assert json.loads((tmp_path / f"{format}.json").read_text())["dtype"] == dtype


def test_what_was_made_otherwise_is_not_replaced(tmp_path, tokenizer, small_parts):
    path = write_lines(tmp_path / "in.jsonl", TEXTS)
    source = fx.data.tokenize(path, tmp_path / "out", tokenizer)
    before = (tmp_path / "out.bin").stat().st_mtime_ns
    assert fx.data.tokenize(path, tmp_path / "out", tokenizer) == source
    assert (tmp_path / "out.bin").stat().st_mtime_ns == before
    other = write_tokenizer(tmp_path, WORDS | {"e": 5}, "other.json")
    with raises_code("FX400", "tokenizer", "voc"):
        fx.data.tokenize(path, tmp_path / "out", other)
    (tmp_path / "out.json").unlink()
    with raises_code("FX400", "out.idx"):
        fx.data.tokenize(path, tmp_path / "out", tokenizer)
    with pytest.raises(Stopped):
        fx.data.tokenize(path, tmp_path / "b", tokenizer, progress=stop_after(1))
    with raises_code("FX400", "b.parts", "end"):
        fx.data.tokenize(path, tmp_path / "b", tokenizer, end="<end>")


@pytest.mark.parametrize("format", ["megatron", "nanogpt"])
def test_a_run_that_stops_leaves_nothing_complete_and_continues(
    tmp_path, tokenizer, small_parts, format
):
    path = write_lines(tmp_path / "in.jsonl", TEXTS * 2)
    job = {"inputs": path, "output": tmp_path / "out", "tokenizer": tokenizer}
    job |= {"format": format, "end": "<end>"}
    with pytest.raises(Stopped):
        fx.data.tokenize(**job, progress=stop_after(2))
    assert _files(tmp_path) == ["out.parts"]
    kept = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out.parts").glob("0*")}
    documents = []

    def see(done, total, count, *_):
        documents.append(count)
        for name, time_ns in kept.items() if done < total else ():
            assert (tmp_path / "out.parts" / name).stat().st_mtime_ns == time_ns

    fx.data.tokenize(**job, progress=see)
    assert (len(kept), documents[-1]) == (2, 6)
    kind = fx.data.MegatronTokens if format == "megatron" else fx.data.NanoGPTTokens
    options = {"path": str(tmp_path / "out")}
    if format == "nanogpt":
        options = {"path": f"{options['path']}.bin", "end": 0}
    assert documents_of(kind(**options)) == [tokens_of(text, 0) for text in TEXTS * 2]


def _workers_of(pid):
    """Processes that a process has started, and which may have outlived it."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == pid:  # the session, which is that of the first process
            found.add(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["command", "worker"])
def test_a_killed_command_continues_and_leaves_no_process(tmp_path, tokenizer, victim):
    path = write_lines(tmp_path / "in.jsonl", ["a b c d " * 4_000] * 400)
    arguments = [str(path), "--to", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    command = [sys.executable, "-m", "fxtrain", "tokens", *arguments, "--workers", "2"]
    started = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("out.parts/00*"))) < 1:
        assert started.poll() is None
        time.sleep(0.01)
    workers = _workers_of(started.pid) - {started.pid}
    os.kill(started.pid if victim == "command" else max(workers), signal.SIGKILL)
    _, error = started.communicate(timeout=60)
    if victim == "worker":
        assert "a process ended while it tokenized" in error
    while _workers_of(started.pid):
        time.sleep(0.01)
    assert _files(tmp_path) == ["out.parts"]
    done = len(list(tmp_path.glob("out.parts/00*")))
    assert done < 13  # parts of 1 MiB
    subprocess.run(command, check=True, timeout=60)
    assert _files(tmp_path) == ["out.bin", "out.idx", "out.json"]
    source = fx.data.tokenize(path, tmp_path / "whole", tokenizer)
    assert (tmp_path / "whole.bin").read_bytes() == (tmp_path / "out.bin").read_bytes()
    assert (tmp_path / "whole.idx").read_bytes() == (tmp_path / "out.idx").read_bytes()
    assert len(documents_of(source)) == 400


@pytest.mark.parametrize("wrong", [{"dtype": "uint16"}, {"dtype": "uint32", "end": 1}])
def test_a_file_is_read_as_it_was_made(tmp_path, tokenizer, wrong):
    path = write_lines(tmp_path / "in.jsonl", TEXTS)
    options = {"format": "nanogpt", "dtype": "uint32", "end": "<end>"}
    source = fx.data.tokenize(path, tmp_path / "out", tokenizer, **options)
    with fx.detect({}, device="cpu") as ctx:
        (batch,) = fx.tokens(source, ctx, length=16, batch_size=1, documents=True)
        assert batch.data["documents"].max() == 2
        other = fx.data.NanoGPTTokens(path=source.path, **wrong)
        with raises_code("FX400", "out.json"):
            fx.tokens(other, ctx, length=16, batch_size=1)
