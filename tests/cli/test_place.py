"""`fxtrain place`."""

import json

import pytest
from safetensors.torch import save_file
from torch import nn

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.state import read_record
from tests.precision._records import RECORDS, marked, mlp


@pytest.fixture
def folder(tmp_path):
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    return str(tmp_path)


def test_a_folder_is_placed_shown_and_written(folder, capsys):
    out = f"{folder}/placement.json"
    memory = ["--memory", "cuda:0=4KiB", "--memory", "cpu=3.1kB", "--prefetch", "1"]
    assert main(["place", folder, *memory, "-o", out]) == Exit.WELL
    shown = capsys.readouterr().out
    assert "0 to 1" in shown and "cuda:0" in shown and "s per token" in shown
    placement = read_record(out, fx.state.Placement)
    assert [unit.device for unit in placement.units].count("cuda:0") == 2
    assert placement.bytes_on("cuda:0") <= 4096 and placement.bytes_on("cpu") <= 3100


def test_json_has_the_placement_the_bytes_and_the_time(folder, capsys):
    words = ["place", folder, "--memory", "cpu=3KiB", "--prefetch", "0", "--json"]
    assert main(words) == Exit.WELL
    report = json.loads(capsys.readouterr().out)
    read = report["forward"]["disk_bytes"]
    assert read == 4 * 1024 and report["bytes"] == {"cpu": 3072, "disk": read}
    assert report["forward"]["least_s"] == pytest.approx(read / report["disk_speed"])


def test_code_is_placed_by_hand(capsys):
    words = ["place", "torch.nn:PReLU", "--device", "=cpu", "--json"]
    assert main(words) == Exit.WELL
    (unit,) = json.loads(capsys.readouterr().out)["placement"]["units"]
    assert unit["device"] == "cpu" and unit["bytes"] == 4


def build():
    return mlp(width=256)


@pytest.mark.parametrize("form", marked(["nf4"]))
def test_quantized_layers_are_measured_as_such(form, tmp_path, capsys):
    wanted = fx.big.sizes(build, quantize=RECORDS[form])
    plan = tmp_path / "plan.yaml"
    plan.write_text("quantize:\n  kind: bnb4\n")
    at = tmp_path / "placement.json"
    for asked in ("bnb4", str(plan)):
        words = ["place", f"{__name__}:build", "--memory", "cpu=1GiB", "--quantize", asked]
        assert main([*words, "-o", str(at)]) == Exit.WELL
        placement = read_record(at, fx.state.Placement)
        assert placement.bytes_on("cpu") == wanted.bytes < 0.3 * fx.big.sizes(build).bytes
    with fx.detect(env={}, device="cpu") as ctx:
        strategy = fx.Offload(placement=placement)
        model = fx.wrap(build().eval(), ctx, fx.Plan(strategy=strategy, quantize="bnb4"))
        assert fx.big.sizes(model.module).bytes == wanted.bytes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory", "cpu"], "'cpu' is not of the form NAME=VALUE"),
        (["--memory", "cpu=1kB"], "Allow at least"),
        (["--memory", "gpu=1GB"], "not a device"),
        (["--memory", "cpu=1GB", "--memory", "cpu=2GB"], "listed twice"),
        (["--quantize", "nf5"], "Choose bnb8, bnb4 or torchao"),
        (["--quantize", "bnb4"], "no classes"),
    ],
)
def test_what_is_refused_is_told(folder, words, told, capsys):
    assert main(["place", folder, *words]) == Exit.WRONG
    assert told in capsys.readouterr().err
