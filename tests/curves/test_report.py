"""What a report contains: every extreme of every curve, and no text that a browser runs."""

import base64
import json
import shutil
import subprocess
from array import array
from html.parser import HTMLParser

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.curves import page_of, picture_of, read_curves
from fxtrain.errors import PlanError, escape_unprintable
from fxtrain.trackers import read_run
from tests._slow import slow_after
from tests.curves._runs import written

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u2028"


def _unpacked(text):
    return array("d", base64.b64decode(text)).tolist()


class _Page(HTMLParser):
    """The elements of a page, the text of its data, and all other text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.kept, self.cells, self.inside = [], {}, [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside = dict(attrs).get("id") or f"{tag}{len(self.kept)}"

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.kept[self.inside] = data
        else:
            self.cells.append(data)

    @property
    def data(self):
        return json.loads(self.kept["data"])


@pytest.fixture
def two_runs(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        for folder, name, plan in (
            ("a", "a", fx.Plan()),
            ("b", NASTY, fx.Plan(seed=3, clip_norm=1.0)),
        ):
            with fx.track(tmp_path / folder, ctx, plan=plan, name=name, settings={NASTY: 1}) as run:
                for at in range(1, 30):
                    values = {"loss": 1 / at, "lr": 0.1, NASTY: at, "eval": {"accuracy": at / 30}}
                    run.log(values, fx.Position(updates=at, samples=8 * at))
    return tmp_path / "a", tmp_path / "b"


def test_the_data_of_the_page_is_the_run(two_runs):
    page = _Page(page_of(read_curves(two_runs)))
    assert [run["label"] for run in page.data["runs"]] == ["a", NASTY]
    names = [metric["name"] for metric in page.data["metrics"]]
    assert names == ["loss", "eval/accuracy", "lr", NASTY]
    for metric in page.data["metrics"]:
        for curve in metric["curves"]:
            log = read_run(two_runs[curve["run"]])
            for axis, over in (("updates", "step"), ("rows", "rows"), ("time", "time")):
                found = zip(_unpacked(curve[axis]), _unpacked(curve["values"]), strict=True)
                assert list(found) == log.curve(curve["name"], over)


def test_evaluation_is_in_the_chart_of_the_training_metric(tmp_path):
    values = {"loss": 2.0, "eval/loss": 3.0, "eval/accuracy": 0.5}
    written(tmp_path / "a", [{"step": 1, "values": values}])
    written(tmp_path / "b", [{"step": 1, "values": {"eval/loss": 4.0}}])
    page = _Page(page_of(read_curves([tmp_path / "a", tmp_path / "b"])))
    charts = {
        metric["name"]: [
            (curve["run"], curve["name"], *_unpacked(curve["values"])) for curve in metric["curves"]
        ]
        for metric in page.data["metrics"]
    }
    assert charts == {
        "loss": [(0, "loss", 2.0), (0, "eval/loss", 3.0), (1, "eval/loss", 4.0)],
        "eval/accuracy": [(0, "eval/accuracy", 0.5)],
    }


def test_with_more_runs_training_and_evaluation_have_charts_of_their_own(tmp_path):
    values = {"loss": 2.0, "eval/loss": 3.0}
    runs = [written(tmp_path / name, [{"step": 1, "values": values}]) for name in "abc"]
    for count, charts in ((2, ["loss"]), (3, ["loss", "eval/loss"])):
        page = _Page(page_of(read_curves(runs[:count])))
        assert [metric["name"] for metric in page.data["metrics"]] == charts
        assert {len(metric["curves"]) for metric in page.data["metrics"]} == (
            {4} if count == 2 else {3}
        )


class _Runs(HTMLParser):
    """The table of runs: the names of its columns, and the keys by which its rows are sorted."""

    def __init__(self, text):
        super().__init__()
        self.head, self.rows, self._in_head = [], [], False
        self.feed(text.partition('aria-label="Runs"')[2].partition("</table>")[0])

    def handle_starttag(self, tag, attrs):
        self._in_head = tag == "button" or (tag == "th" and ("scope", "col") in attrs)
        if tag == "tr":
            self.rows.append([])
        if "data-key" in dict(attrs):
            self.rows[-1].append(dict(attrs)["data-key"])

    def handle_data(self, data):
        if self._in_head and data.strip():
            self.head.append(data)


def test_the_table_of_runs_has_their_best_value_and_the_settings_that_differ(tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        for name, rate, worst in (("a", 0.1, 4.0), ("b", 0.2, 3.0), ("c", 0.2, 5.0)):
            plan = fx.Plan(seed=7 if name == "c" else 0)
            settings = {"lr": rate, "layers": 2}
            with fx.track(tmp_path / name, ctx, plan=plan, settings=settings) as run:
                for at in (1, 2, 3):
                    values = {"loss": 1.0, "eval": {"loss": worst - at}}
                    run.log(values, fx.Position(updates=at, samples=at))
    table = _Runs(page_of(read_curves([tmp_path / name for name in "abc"])))
    assert table.head[:6] == ["Run", "Lowest eval/loss", "lr", "plan.seed", "Updates", "Rows"]
    assert [row[:6] for row in table.rows[1:]] == [
        ["a", "1.0", "0.1", "0", "3.0", "3.0"],
        ["b", "0.0", "0.2", "0", "3.0", "3.0"],
        ["c", "2.0", "0.2", "7", "3.0", "3.0"],
    ]
    assert len({len(row) for row in table.rows[1:]} | {len(table.head)}) == 1
    alone = _Runs(page_of(read_curves([tmp_path / "a"])))
    assert alone.head[:3] == ["Run", "Lowest eval/loss", "Updates"]


@pytest.mark.parametrize(
    ("names", "title"),
    [
        (["loss", "eval/accuracy"], "Highest eval/accuracy"),
        (["loss", "lr"], "Lowest loss"),
        (["loss", "eval"], "Highest eval"),
        (["lr"], "Updates"),
        ([], "Updates"),
    ],
)
def test_runs_are_compared_by_evaluation_or_else_by_the_loss(tmp_path, names, title):
    lines = [{"step": 1, "values": {name: 1.0}} for name in names]
    assert _Runs(page_of(read_curves([written(tmp_path, lines)]))).head[1] == title


def test_a_page_loads_nothing_and_runs_only_its_own_scripts(two_runs):
    page = _Page(page_of(read_curves(two_runs)))
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len(scripts) == 3
    assert not [one for tag, one in page.tags if tag == "img" or any(n[:2] == "on" for n in one)]
    links = [one.get("src") or one.get("href") for _, one in page.tags]
    assert [link for link in links if link] == ["data:,"]
    policy = next(one["content"] for _, one in page.tags if "http-equiv" in one)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    text = "".join(page.cells)
    assert NASTY.replace("\u2028", "\\u2028") in text  # shown as it was written


def test_the_plan_table_marks_what_diff_finds(two_runs):
    html = page_of(read_curves(two_runs))
    marked = {
        part.split('<th scope="row">')[1].split(" <span")[0]
        for part in html.split("</tr>")
        if 'class="different"' in part
    }
    changes = fx.diff(fx.Plan(), fx.Plan(seed=3, clip_norm=1.0))
    assert marked == {one.path for one in changes} | {"fingerprint"}


@given(name=st.text(max_size=20), value=st.text(max_size=20))
@settings(max_examples=25)
def test_no_text_of_a_run_becomes_an_element(tmp_path_factory, name, value):
    folder = tmp_path_factory.mktemp("run")
    written(folder, [{"step": 1, "values": {name: 1.0}}], name=value)
    runs = [attrs.evolve(run, params={name: value}) for run in read_curves([folder])]
    page = _Page(page_of(runs))
    plain = [attrs.evolve(run, label="a", params={"a": "a"}) for run in runs]
    plain = [attrs.evolve(run, curves={"a": run.curves[name]}) for run in plain]
    expected = _Page(page_of(plain))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in expected.tags]
    assert [list(one) for _, one in page.tags] == [list(one) for _, one in expected.tags]
    assert page.data["metrics"][0]["name"] == name
    assert page.data["runs"][0]["label"] == (value or folder.name)


@given(name=st.text(max_size=20), cell=st.one_of(st.text(max_size=20), st.none(), st.floats()))
@settings(max_examples=20)
def test_logged_tables_are_shown_as_text(tmp_path_factory, name, cell):
    folder = tmp_path_factory.mktemp("run")
    tables = [
        {name: {"columns": ["rank", name], "rows": [[1, one], [2, "x"]]}} for one in (3, cell)
    ]
    odd = [{name: one} for one in (None, {"columns": 1, "rows": []}, {"columns": [], "rows": []})]
    rows = [[at, at] for at in range(150)]
    long = [{"long": {"columns": ["a", "b"], "rows": [*rows, [1]]}}]
    lines = [{"step": 7, "table": one} for one in (*tables, *odd, *long)]
    page = _Page(page_of(read_curves([written(folder, lines)])))
    assert [tag for tag, _ in page.tags].count("h3") == (1 if name == "long" else 2)
    shown = escape_unprintable(str(None if cell is None else cell))
    assert name == "long" or shown in "\0".join(page.cells).replace("\r", "\n")
    assert "51 more rows are not shown." in page.cells
    assert "".join(page.kept.values()).count("<td>") == 0


def test_an_empty_run_has_a_page(tmp_path):
    written(tmp_path, [])
    page = _Page(page_of(read_curves([tmp_path])))
    assert page.data["metrics"] == [] and "No metric has been logged." in page.cells


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "No such file or directory"),
        ({"metrics.jsonl": ""}, "no line that starts a run"),
        ({"metrics.jsonl": '{"step":1,"values":{"loss":1}}\n'}, "no line that starts a run"),
        ({"events.out.tfevents.1": "x"}, "writes this file"),
        ({"a/metrics.jsonl": ""}, "Pass the runs in this folder: a"),
    ],
)
def test_a_folder_without_such_a_run_is_named(tmp_path, files, words):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=words):
        read_curves([tmp_path])


def test_the_command(two_runs, tmp_path, capsys):
    page, picture = tmp_path / "page.html", tmp_path / "loss.svg"
    assert main(["report", *map(str, two_runs), "--output", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    pictured = ["report", str(two_runs[0]), "--over", "rows", "--curve"]
    assert main([*pictured, "loss", "--output", str(picture)]) == 0
    assert "<svg" in picture.read_text()
    assert capsys.readouterr().err == ""
    assert main([*pictured, "los", "--output", str(picture)]) == 2
    assert main([*pictured, "loss", "--output", "loss.html"]) == 2
    assert main(["report", str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err
    assert "Did you mean 'loss'?" in told and "ends in .svg" in told and "no such folder" in told
    figure = picture_of(read_curves(two_runs), NASTY, over="time")
    figure.savefig(tmp_path / "nasty.png")


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


# Colors of the first two runs and of the paper, as page.css has them.
LIGHT = ((11, 98, 196), (179, 66, 10)), (255, 255, 255)
DARK = ((108, 178, 255), (255, 157, 92)), (20, 23, 27)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", slow_after(1, [390, 1280]))
@pytest.mark.parametrize(
    "scheme",
    slow_after(1, [pytest.param(LIGHT, id="light"), pytest.param(DARK, id="dark")]),
)
def test_a_browser_draws_the_curves_and_has_nothing_to_say(two_runs, tmp_path, width, scheme):
    from matplotlib.image import imread

    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    page.write_text(page_of(read_curves(two_runs)), encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path}/user", f"--window-size={width},2400",
         f"--blink-settings=preferredColorScheme={int(scheme is LIGHT)}",
         "--virtual-time-budget=4000", f"--screenshot={shot}", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    pixels = (imread(shot)[..., :3] * 255).round().astype(int)
    colors, paper = scheme
    for color in colors:
        assert (abs(pixels - color).sum(-1) < 8).sum() > 500
    assert (abs(pixels - paper).sum(-1) < 8).mean() > 0.2
