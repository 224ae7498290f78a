"""`fxtrain tokens`: writing files of tokens."""

import json

import pytest

from fxtrain.cli import main
from tests.data._texts import write_lines, write_tokenizer

TEXTS = ["a b c", "d", "b b b a", ""]


@pytest.fixture
def made(tmp_path, capsys):
    arguments = [str(write_lines(tmp_path / "in.jsonl", TEXTS, "body")), "--column", "body"]
    arguments += ["--to", str(tmp_path / "out"), "--tokenizer", str(write_tokenizer(tmp_path))]
    arguments = ["tokens", *arguments, "--end", "<end>", "--workers", "1"]
    assert main(arguments) == 0
    wrote = f"Wrote {tmp_path}/out.idx: 3 documents, 11 tokens; 1 empty document left out.\n"
    assert capsys.readouterr() == (wrote, "")
    return tmp_path, arguments


def test_a_second_call_does_nothing(made, capsys):
    folder, arguments = made
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{folder}/out.idx is complete already.\n"
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"wrote": None}


def test_a_line_is_printed_now_and_then_without_a_terminal(made, capsys, monkeypatch):
    folder, arguments = made
    monkeypatch.setattr("fxtrain.cli.tokens_command._LINE_EVERY_S", 0.0)
    arguments[arguments.index("--to") + 1] = str(folder / "again")
    assert main(arguments) == 0
    expected = "100.0%: 3 documents, 11 tokens; 1 empty document left out\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in.jsonl"], "Missing option '--to'"),
        (["in.jsonl", "--to", "b"], "Missing option '--tokenizer'"),
        (["in.jsonl", "--to", "b", "--tokenizer", "t"], "no tokenizer at t"),
    ],
)
def test_wrong_arguments_are_named(made, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(made[0])
    assert main(["tokens", *arguments]) == 2
    assert message in capsys.readouterr().err
