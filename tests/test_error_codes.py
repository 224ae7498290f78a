"""Every error ends with a code, whose cause and cure are on the site and in the terminal."""

import json
import pickle
import re
from pathlib import Path

import pytest

import fxtrain as fx
from docs._sphinx import site_reference
from fxtrain.cli import Exit, main
from fxtrain.cli.explain_command import read_codes
from tests.docs.running import unknown_names

ROOT = Path(__file__).parents[1]
ERROR_CODES = read_codes()
CLASSES = [getattr(fx, name) for name in fx.__all__ if name.endswith("Error")]
CODES = [one.code for one in ERROR_CODES]


@pytest.fixture(scope="module")
def page():
    return site_reference.generated_pages()["reference/errors"]


def test_the_codes_of_the_source_are_those_of_the_table():
    files = (ROOT / "fxtrain").rglob("*.py")
    used = {code for path in files for code in re.findall(r'"(FX\d{3})"', path.read_text())}
    assert used == set(CODES)
    assert sorted(set(CODES)) == CODES


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_has_a_code_of_its_own_before_those_of_its_errors(kind):
    of_class = [one for one in ERROR_CODES if one.error == kind.__name__]
    assert of_class[0].code == kind.code
    assert [one.code for one in of_class if not one.title] == [kind.code]
    assert len({one.code[2] for one in of_class}) == 1


@pytest.mark.parametrize("one", ERROR_CODES, ids=CODES)
def test_a_code_has_cause_and_cure_on_the_page_and_in_the_terminal(one, page, capsys):
    section = page.partition(f"({one.code.lower()})=\n")[2].partition("\n(fx")[0]
    assert main(["explain", one.code]) == Exit.WELL
    shown = " ".join(capsys.readouterr().out.split())
    for name, text in (("Cause", one.cause), ("Cure", one.cure)):
        assert f"**{name}:** {text}" in section and f"{name}: {text}" in shown
        assert text.endswith(".")
        assert not any(map(unknown_names, re.findall(r"`(fx\.[^`…]*)`", text)))
    assert not one.see or (ROOT / "docs" / f"{one.see.partition('#')[0]}.md").exists()


def test_a_class_is_explained_with_the_codes_of_its_errors(capsys):
    assert main(["explain", "CheckpointError", "--json"]) == Exit.WELL
    shown = json.loads(capsys.readouterr().out)
    assert [one["code"] for one in shown] == [code for code in CODES if code[2] == "6"]
    assert main(["explain"]) == Exit.WELL
    assert re.findall(r"^FX\d+", capsys.readouterr().out, re.MULTILINE) == CODES


@pytest.mark.parametrize("word", ["fx602", "602", "[FX602]", "[FX602]."])
def test_a_code_is_found_as_it_is_copied(word, capsys):
    assert main(["explain", word]) == Exit.WELL
    assert capsys.readouterr().out.startswith("FX602 CheckpointError: The files are damaged\n")


@pytest.mark.parametrize(("word", "nearest"), [("FX609", "FX607"), ("Planerro", "PlanError")])
def test_an_unknown_code_names_the_nearest(word, nearest, capsys):
    assert main(["explain", word]) == Exit.WRONG
    assert nearest in capsys.readouterr().err


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_ends_with_its_code_once(kind):
    error = kind("What was asked. What to do.")
    assert str(error) == f"What was asked. What to do. [{kind.code}]"
    assert str(kind(str(error))) == str(kind(error)) == str(error)
    precise = kind("Text.", code="FX602")
    assert str(pickle.loads(pickle.dumps(precise))) == str(precise) == "Text. [FX602]"
    assert (precise.message, str(kind())) == ("Text.", "")


def test_an_error_that_quotes_another_has_the_code_of_that_one():
    inner = fx.CheckpointError("x.safetensors was changed.", code="FX602")
    outer = fx.CollectiveError(f"Another rank failed:\n  rank 1: {inner} Copy it.", code="FX303")
    assert str(outer) == (
        "Another rank failed:\n  rank 1: x.safetensors was changed. Copy it. [FX602]"
    )
    assert str(fx.errors.LaunchError(f"Rank 1: {outer}")).count("[FX602]") == 1
