"""The pictures of the site: valid, readable without sight, in the colors of the page, and true."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import fxtrain as fx

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "_sphinx"))

from site_drawing import Drawing, box, svg_of  # noqa: E402
from site_pages import written_pages  # noqa: E402
from site_pictures import PICTURES, rows_of_ranks, stage_orders, start_times  # noqa: E402

PAGES = list(written_pages(ROOT / "docs").values())
USED = [name for path in PAGES for name in re.findall(r"```\{picture\} (\w+)", path.read_text())]
QUICK = sorted(set(PICTURES) - {"memory"})  # which takes four dry runs


def test_every_picture_is_on_one_page():
    assert sorted(USED) == sorted(PICTURES)


@pytest.mark.parametrize("name", QUICK)
def test_a_picture_is_text_too_and_has_no_colors_of_its_own(name):
    drawing = PICTURES[name]()
    text = svg_of(drawing, "What it\nshows.", name)
    svg = ET.fromstring(text)[0]
    at = "{http://www.w3.org/2000/svg}"
    assert svg.find(f"{at}title").text == drawing.title
    assert svg.find(f"{at}desc").text == "What it shows."
    assert not re.search(r"(fill|stroke|color)=|#[0-9a-f]{6}", text)
    for one in svg.iter(f"{at}rect"):
        right = float(one.get("x")) + float(one.get("width"))
        bottom = float(one.get("y")) + float(one.get("height"))
        assert right <= drawing.width and bottom <= drawing.height, one.attrib
    assert all(float(one.get("y")) <= drawing.height for one in svg.iter(f"{at}text"))


def test_text_in_a_picture_is_escaped():
    shapes = (box(0, 0, 9, 9, "a < b"),)
    drawing = Drawing(title="<t>", shapes=shapes, width=9, height=9)
    assert "&lt;t&gt;" in svg_of(drawing, "x & y", "p") and "a &lt; b" in shapes[0]


def test_a_window_has_the_rows_that_it_says():
    ranks = rows_of_ranks(17, 3, 2, fx.Plan(accumulate=2, even="uneven"))
    shown = [row for own in ranks for one in own for row in one.data[one.valid].tolist()]
    assert sorted(shown) == list(range(17))
    assert [one.position.micro for one in ranks[0]] == [1, 0, 0]
    assert torch.equal(ranks[1][2].valid, torch.tensor([True, True])[: ranks[1][2].valid.numel()])


def test_a_stage_keeps_as_many_activations_as_its_schedule_says():
    for schedule, most in (("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])):
        orders = stage_orders(schedule, 4, 8)
        kept = [[0] * 17 for _ in orders]
        for stage, order in enumerate(orders):
            assert sorted(order) == [(kind, n) for kind in "BF" for n in range(8)]
            for at, (kind, _) in enumerate(order):
                kept[stage][at + 1] = kept[stage][at] + (1 if kind == "F" else -1)
        assert [max(own) for own in kept] == most
        ends = [max(own) + 2 for own in start_times(orders)]
        assert max(ends) == (8 + 3) * 3  # (M + S - 1) micro-batches of length 3, with the bubble


@pytest.mark.slow
def test_a_memory_bar_shrinks_with_each_strategy():
    text = svg_of(PICTURES["memory"](), "x", "memory")
    shown = [float(one) for one in re.findall(r">(\d+) MiB<", text)]
    assert len(shown) == 4 and shown == sorted(shown, reverse=True)
