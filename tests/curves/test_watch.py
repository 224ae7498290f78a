"""Following a run: whatever is added in whatever parts, the same values are seen."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxtrain.cli import main
from fxtrain.curves import RunReader, sparkline

START = json.dumps({"step": 0, "start": {"id": "1", "name": "a", "params": {}}}) + "\n"


def _line(step, value):
    return json.dumps({"step": step, "values": {"loss": value, "ü/lr": 0.5}}) + "\n"


@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20),
    cuts=st.lists(st.integers(0, 1500), max_size=5),
)
@settings(max_examples=25)
def test_parts_are_followed_as_the_whole(tmp_path_factory, values, cuts):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    data = (START + "".join(map(_line, range(len(values)), values))).encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = RunReader(path=path)
    for start, end in pairwise(edges):
        with path.open("ab") as file:
            file.write(data[start:end])
        reader.read()
    assert reader.run.curves == RunReader(path=path).read().run.curves
    assert (reader.end, reader.run.starts) == (len(data), 1)
    assert not values or reader.run.curves["loss"].values == values


def test_a_long_run_keeps_its_extremes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(START)
    reader = RunReader(path=path)
    for part in range(5):
        with path.open("a") as file:
            lines = (
                _line(at, at % 7 + 99 * (at == 1234))
                for at in range(part * 1000, part * 1000 + 1000)
            )
            file.writelines(lines)
        reader.read()
    loss = reader.run.curves["loss"]
    assert (max(loss.values), loss.count, loss.places[-1][0]) == (1234 % 7 + 99, 5000, 4999)
    assert len(loss.values) <= 800


def test_a_resumed_run_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(START + _line(1, 1.0) + _line(2, 2.0))
    reader = RunReader(path=path).read()
    draft = tmp_path / "draft"
    draft.write_text(START + _line(1, 1.0) + _line(2, 5.0) + _line(3, 6.0))
    draft.replace(path)
    assert reader.read().run.curves["loss"].values == [1.0, 5.0, 6.0]
    path.write_text(START + _line(1, 3.0))
    assert reader.read().run.curves["loss"].values == [3.0]


def test_a_sparkline_shows_large_and_equal_values():
    assert sparkline([-1.7e308, 1.7e308], 9) == "▁█"
    assert sparkline([2.0, 2.0], 9) == "▁▁" and sparkline([], 9) == ""
    assert set(sparkline([0.1] * 100, 30)) == {"▁"}


def test_the_command_prints_once_without_a_terminal(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(START + _line(1, 4.0) + _line(2, 0.25))
    assert main(["watch", str(tmp_path)]) == 0
    told = capsys.readouterr()
    row = next(line for line in told.out.splitlines() if line.startswith("loss"))
    assert row.split() == ["loss", "0.25", "0.25", "4", "█▁"] and told.err == ""


@pytest.mark.parametrize("text", [None, _line(1, 2.0)])
def test_a_folder_without_a_run_is_an_error(tmp_path, text, capsys):
    if text:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["watch", str(tmp_path)]) == 2
    assert "Pass the folder of a run" in (told := capsys.readouterr().err) or "No such file" in told


def test_a_terminal_waits_for_a_run_that_has_not_begun(tmp_path, monkeypatch, capsys):
    folder, slept = tmp_path / "run", []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:  # the folder is made before its file
            folder.mkdir()
        if len(slept) == 3:
            (folder / "metrics.jsonl").write_text(START + _line(1, 4.0))
        if len(slept) > 3:  # it is watched
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("time.sleep", sleep)
    assert main(["watch", str(folder)]) == 0
    assert len(slept) == 4
    told = capsys.readouterr()
    assert f"Waiting for {folder / 'metrics.jsonl'}" in told.err.replace("\n", "")
    assert "loss" in told.out
