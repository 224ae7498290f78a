"""The spelling is American, as in torch: names, messages, docstrings and pages."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = "fxtrain", "docs", "tests", "property_tests", "examples", "benchmarks", ".ci"
SUFFIXES = {".py", ".pyi", ".md", ".toml", ".js", ".mjs", ".css", ".html", ".sh", ""}
# Names of other libraries, and a library.
OTHERS = {"library_names.json", "uPlot.iife.min.js", "uPlot.min.css"}

ENDINGS = "e|ed|er|es|ing|ation|ations|able"
BRITISH = re.compile(
    rf"""
      (?: quanti | initiali | recogni | normali | materiali | synchroni | seriali | optimi
        | organi | summari | generali | speciali | minimi | maximi | tokeni | utili | customi
        | randomi | reali | paralleli | memori | visuali | finali )s(?:{ENDINGS})(?![a-z])
    | (?<![a-z])(?: analys | paralys | catalys )(?:e|ed|er|ing)(?![a-z])
    | colour | neighbour | behaviour | (?<![a-z])(?: favour | honour | labour | flavour )
    | (?: signal | model | travel | cancel | label | level | total | channel | marshal | tunnel )
      l(?:ed|ing|er)(?![a-z]) (?<! labelled(?=by) )
    | (?<![a-z])(?: grey | litres? | metres? | centres? | centred | fibres? | licence[sd]?
        | defence | offence | programmes? | catalogues? | dialogues? | judgement | artefacts?
        | whilst | amongst | learnt | (?:mis)?spelt | fulfil | enrol | ageing )(?![a-z])
    """,
    re.VERBOSE,
)


def test_the_spelling_is_american():
    files = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    files += [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    found = []
    for path in files:
        if path.suffix not in SUFFIXES or path.name in OTHERS or path == pathlib.Path(__file__):
            continue
        text = path.read_text(encoding="utf-8").lower()
        found += [
            f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
            for match in BRITISH.finditer(text)
        ]
    assert not found, "Use the American spelling:\n" + "\n".join(found)


def test_the_pattern_knows_both_spellings():
    british = "quantised colours neighbouring behaviour labelled signalled analysed licence centre"
    american = "quantized colors neighboring behavior labeled signaled analyses license center"
    assert all(BRITISH.search(word) for word in british.split())
    assert not any(BRITISH.search(word) for word in american.split())
