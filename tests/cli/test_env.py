"""`fxtrain env`: what it tells, and what it keeps to itself."""

import json

import pytest

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.cli.inspect import collect, hidden
from fxtrain.cli.inspect._secrets import hidden_words

PRIVATE = "s3cr3t-value"


def test_it_names_versions_devices_and_ways_to_communicate():
    groups = collect({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"})
    assert list(groups) == [
        "versions", "machine", "devices", "topology", "communication", "config", "variables",
    ]  # fmt: skip
    assert groups["versions"]["fxtrain"] == fx.__version__
    assert "gloo" in groups["communication"]["back ends"]
    assert "lo" in groups["communication"]["interfaces"]
    assert groups["topology"]["this process"] == "rank 1 of 2 (plain)"
    assert groups["variables"]["MASTER_ADDR"] == "n1"


def test_a_launcher_that_contradicts_itself_is_told():
    place = collect({"RANK": "5", "WORLD_SIZE": "2"})["topology"]["this process"]
    assert place.startswith("not readable: ")


@pytest.mark.parametrize(
    "env",
    [
        {"HF_TOKEN": PRIVATE},
        {"SLURM_JWT_TOKEN": PRIVATE},
        {"TPU_API_KEY": PRIVATE},
        {"NCCL_PROXY": f"http://me:{PRIVATE}@host:80"},
        {"FXTRAIN_LAUNCH__ARGS": f'["--api-key", "{PRIVATE}", "--token={PRIVATE}"]'},
        {"FXTRAIN_LAUNCH__RANKS": PRIVATE},  # wrong values are not repeated
        {"TORCH_HOME": f"/home/{PRIVATE}/x", "HOME": f"/home/{PRIVATE}"},
        {"CUDA_X": f"hf_{PRIVATE.replace('-', '')}aaaa"},
    ],
    ids=lambda env: next(iter(env)),
)
def test_secrets_are_left_out(env):
    assert PRIVATE not in (said := json.dumps(collect(env)))
    assert PRIVATE.replace("-", "") not in said


def test_plain_values_are_shown():
    assert hidden("NCCL_SOCKET_IFNAME", "eth0") == "eth0"
    assert hidden("X", "/a/b", home="/") == "/a/b"
    assert hidden_words(["--lr", "0.1", "train", "--x=1"]) == ["--lr", "0.1", "train", "--x=1"]


def test_values_come_with_their_origin(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fxtrain.toml").write_text("[launch]\nranks = 3\n")
    assert main(["env", "--json"]) == Exit.WELL
    told = json.loads(capsys.readouterr().out)
    assert told["config"]["launch.ranks"] == "3 (file fxtrain.toml)"
    assert main(["env"]) == Exit.WELL
    assert "- launch.ranks: 3 (file fxtrain.toml)" in capsys.readouterr().out.splitlines()
