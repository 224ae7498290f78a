"""The table of words in CONTRIBUTING.md: those that it rules out are in no name and in no text."""

import pathlib
import re

import fxtrain

ROOT = pathlib.Path(fxtrain.__file__).parent
PAGE = ROOT.parent / "CONTRIBUTING.md"
# Snake case and camel case are several words: `lap_time`, `MineOnly`.
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Rows are data; a strategy, launcher or tracker is an entry of its table.
ROW_FOR_ENTRY = re.compile(r"\brow: (?:Strategy|Launcher|Tracker)\b|\bstrategy=row\b")


def words_never_used() -> set[str]:
    table = PAGE.read_text(encoding="utf-8").partition("## Words\n")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    return {word for row in rows[1:] for word in re.findall(r"\w+", row[2])}


def uses(source: str, words: set[str]) -> list[tuple[int, str]]:
    """Line and word of each use, in names, comments and strings."""
    return [
        (number, word.lower())
        for number, line in enumerate(source.splitlines(), 1)
        for word in WORD.findall(line)
        if word.lower() in words
    ] + [
        (source.count("\n", 0, match.start()) + 1, match[0])
        for match in ROW_FOR_ENTRY.finditer(source)
    ]


def test_words_that_the_table_rules_out_are_not_used():
    words = words_never_used()
    assert {"mine", "lap", "told"} <= words
    found = [
        f"{path.relative_to(ROOT.parent)}:{line}: {word}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, word in uses(path.read_text(encoding="utf-8"), words)
    ]
    assert not found, "See the words in CONTRIBUTING.md:\n" + "\n".join(found)


def test_pages_do_not_use_them_either():
    """Outside of code, in which a reader's own names may be `mine`."""
    docs = PAGE.with_name("docs")
    # A build writes these from what the test above reads, with examples as code.
    generated = docs / "reference", docs / "examples"
    found = []
    for page in [PAGE.with_name("README.md"), *docs.rglob("*.md")]:
        if page.parent in generated:
            continue
        text = page.read_text(encoding="utf-8")
        prose = re.sub(
            r"(?ms)^ *```.*?^ *```$|`[^`\n]*`", lambda code: "\n" * code[0].count("\n"), text
        )
        found += [f"{page.name}:{line}: {word}" for line, word in uses(prose, words_never_used())]
    assert not found, "See the words in CONTRIBUTING.md:\n" + "\n".join(found)


def test_a_word_is_found_in_names_comments_and_texts():
    source = 'class MineOnly:\n    lap_time = "told: never"  # drifting\n\n\nstrategy=row\n'
    found = uses(source, {"mine", "lap", "told", "drifting"})
    assert found == [
        (1, "mine"),
        (2, "lap"),
        (2, "told"),
        (2, "drifting"),
        (5, "strategy=row"),
    ]
