"""Which rows the updates of a run had, by the files that scripts/train.py writes."""

import itertools
import json
import re
from collections import Counter

EPOCHS = 2


def last_rows(lab):
    """By update, the rows of all ranks in the last attempt that made it."""
    lines = [
        json.loads(line)
        for node in lab.nodes
        for path in node.disk.glob("rows-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    found: dict[int, list[int]] = {}
    for update in {line["update"] for line in lines}:
        made = [line for line in lines if line["update"] == update]
        world = max(made, key=lambda line: line["time"])["world"]
        newest = {
            line["rank"]: line["rows"]
            for line in sorted(made, key=lambda line: line["time"])
            if line["world"] == world
        }
        found[update] = [row for rows in newest.values() for row in rows]
    return found


def every_row_once(lab, count, copies=1):
    """Every row of every epoch was seen as often as there are copies, and no update is missing."""
    rows = last_rows(lab)
    per_epoch = len(rows) // EPOCHS
    assert sorted(rows) == [*range(1, EPOCHS * per_epoch + 1)]
    for epoch in range(EPOCHS):
        updates = range(1 + epoch * per_epoch, 1 + (epoch + 1) * per_epoch)
        seen = Counter(row for update in updates for row in rows[update])
        assert seen == dict.fromkeys(range(count), copies)


def went_back(lab, texts):
    """Every update that was made again comes after one that a restart has named."""
    named = {int(n) for text in texts for n in re.findall(r"continues after update (\d+)\.", text)}
    begun: set[int] = set()
    for node in lab.nodes:
        for path in node.disk.glob("rows-*.jsonl"):
            updates = [json.loads(line)["update"] for line in path.read_text().splitlines()]
            pairs = itertools.pairwise(updates)
            begun |= {after - 1 for before, after in pairs if after != before + 1}
    assert begun <= named | {0}, (begun, named)
