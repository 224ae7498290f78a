"""A report without a mouse and without sight: real keys, and what a screen reader is given."""

import pytest

import fxtrain as fx
from fxtrain.curves import page_of, read_curves
from tests.curves._browser import BROWSER, MISSING, browser

pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)

FOCUSED = "document.activeElement.id || document.activeElement.className"
CHART = "document.querySelector('.plot canvas').toDataURL()"
SAID = "document.getElementById('status').textContent"
LABEL = "document.querySelector('.plot canvas').getAttribute('aria-label')"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    with fx.detect(env={}, device="cpu") as ctx:
        for name in ("a", "b"):
            with fx.track(folder / name, ctx, plan=fx.Plan(), name=name) as run:
                for at in range(1, 31):
                    run.log({"loss": 1 / at + (name == "b")}, fx.Position(updates=at))
    file = folder / "page.html"
    file.write_text(page_of(read_curves([folder / "a", folder / "b"])), encoding="utf-8")
    with browser(folder / "user") as found:
        found.open(file.as_uri())
        yield found
    assert found.console == []


def _focus(page, wanted):
    for _ in range(40):
        if page.ask(FOCUSED) == wanted:
            return
        page.press("Tab")
    raise AssertionError(f"{wanted} is not reached by Tab")


def test_tab_reaches_everything_in_the_order_of_the_page(page):
    page.ask("document.activeElement.blur()")
    reached = []
    for _ in range(21):
        page.press("Tab")
        reached.append(page.ask(FOCUSED))
    controls = ["over", "smoothing", "filter", "logarithmic", "reset", "plot"]
    # Tables that scroll: runs, whose columns sort; then values, plan and environment.
    assert reached == ["wide", *["sort"] * 9, "show", "show", *controls, "wide", "wide", "wide"]


ROWS = "[...document.querySelectorAll('input.show')].map((one) => one.value).join()"
SORTED = "[...document.querySelectorAll('th[aria-sort]')].map((one) => one.textContent).join()"


def test_the_head_of_a_column_sorts_the_runs(page):
    assert page.ask(ROWS) == "0,1"
    for rows in ("0,1", "1,0", "0,1"):  # the lowest loss of the first run is lower
        page.ask("document.querySelectorAll('button.sort')[1].click()")
        assert (page.ask(SORTED), page.ask(ROWS)) == ("Lowest loss", rows)


def test_arrows_move_along_the_curves_and_say_the_values(page):
    _focus(page, "plot")
    page.press("ArrowRight")
    assert page.ask(SAID) == "updates 1: a 1, b 2"
    page.press("ArrowRight")
    assert page.ask(SAID) == "updates 2: a 0.5, b 1.5"
    page.press("End")
    assert page.ask(SAID) == "updates 30: a 0.0333333, b 1.03333"
    page.press("ArrowRight")
    assert page.ask(SAID).startswith("updates 30:")
    page.press("Home")
    assert page.ask(SAID).startswith("updates 1:")


def test_plus_zooms_and_escape_resets(page):
    _focus(page, "plot")
    whole = page.ask(CHART)
    page.press("+")
    near = page.ask(CHART)
    page.press("-")
    assert near != whole and page.ask(CHART) == whole
    page.press("+")
    page.press("+")
    page.press("Escape")
    assert page.ask(CHART) == whole


def test_space_hides_a_run(page):
    assert page.ask(LABEL) == "loss over updates: a, last value 0.0333333; b, last value 1.03333"
    _focus(page, "show")
    page.press(" ")
    assert page.ask(LABEL) == "loss over updates: b, last value 1.03333"
    page.press(" ")
    assert "a, last" in page.ask(LABEL)


def test_a_screen_reader_is_given_names_and_structure(page):
    nodes = [
        (one["role"]["value"], one["name"]["value"].strip(), one.get("properties", ()))
        for one in page.call("Accessibility.getFullAXTree")["nodes"]
        if not one["ignored"] and "name" in one
    ]
    found = {(role, name) for role, name, _ in nodes}
    assert {
        ("checkbox", "a"), ("combobox", "Over"), ("slider", "Smoothing"),
        ("searchbox", "Metrics"), ("checkbox", "Logarithmic"), ("button", "Reset zoom"),
        ("group", "loss"), ("heading", "Values"), ("region", "Plan"), ("columnheader", "Lowest"),
        ("rowheader", "loss"), ("main", ""), ("status", ""),
    } <= found  # fmt: skip
    assert any(role == "image" and name.startswith("loss over") for role, name in found)
    for role, name, properties in nodes:
        focusable = any(p["name"] == "focusable" and p["value"]["value"] for p in properties)
        assert name or not focusable, role
    assert page.ask("document.documentElement.lang") == "en"
