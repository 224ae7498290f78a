"""`fxtrain tokens`: writing files of tokens, and showing what they hold."""

import json

import numpy
import pytest

from fxtrain.cli import main
from fxtrain.data import BestFit
from tests.data._texts import WORDS, write_lines, write_tokenizer

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


def test_a_file_is_shown(made, capsys):
    folder, _ = made
    show = ["tokens", "--show", str(folder / "out.bin"), "--length", "4"]
    assert main([*show, "--tokenizer", str(folder / "tokenizer.json")]) == 0
    shown = capsys.readouterr().out
    assert "MegatronTokens" in shown
    assert "a b c <end> d <end> b b b a <end>" in shown
    assert f"8.333%\n{'longer than a row':<22}33.333%" in shown
    assert shown.endswith(
        "2 to 3          1  ####################\n4 to 7          2  " + "#" * 40 + "\n"
    )


def test_shares_are_those_of_the_rows(made, capsys):
    folder, _ = made
    assert main(["tokens", "--show", str(folder / "out"), "--length", "5", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    # Rows: a b c . d | . b b b a | .
    assert shown["lengths"] == {"2 to 3": 1, "4 to 7": 2}
    assert shown["sample"] == [1, 2, 3, 0, 4, 0, 2, 2, 2, 1, 0]
    assert (shown["documents"], shown["tokens"], shown["rows"]) == (3, 11, 3)
    assert shown["padding"] == pytest.approx(4 / 15)
    assert shown["cut_by_concatenation"] == pytest.approx(2 / 3)
    assert (shown["cut_by_best_fit"], shown["longer_than_a_row"]) == (0, 0)


def test_a_document_that_two_windows_of_rows_share_is_counted_once(tmp_path, capsys):
    tokens = numpy.ones(2 * BestFit().window_rows + 8, "<u2")
    tokens[[1, -1]] = 0  # the ends of two documents; the first fits into a row
    tokens.tofile(tmp_path / "in.bin")
    arguments = ["tokens", "--show", str(tmp_path / "in.bin"), "--end", "0", "--length", "2"]
    assert main([*arguments, "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["documents"], shown["longer_than_a_row"]) == (2, 1 / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show", "in.jsonl"], "no format of tokens is known by the name"),
        (["--show", "out", "--tokenizer", "other.json"], "was made with a tokenizer of 5 tokens"),
        (["--show", "raw.bin", "--tokenizer", "tokenizer.json"], "has a token 9, and the voc"),
        (["--show", "raw.bin", "--end", "<end>"], "with --show, '<end>' is no number"),
        (["in.jsonl"], "Pass --to and --tokenizer, or --show"),
        (["in.jsonl", "--to", "b", "--tokenizer", "t", "--length", "3"], "--length needs --show"),
    ],
)
def test_wrong_arguments_are_named(made, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(made[0])
    write_tokenizer(made[0], WORDS | {"e": 5}, "other.json")
    (made[0] / "raw.bin").write_bytes(bytes([9, 0]))
    assert main(["tokens", *arguments]) == 2
    assert message in capsys.readouterr().err
