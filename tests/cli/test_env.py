"""`fxtrain env`: what it tells, and what it keeps to itself."""

import json
import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain import _host_memory
from fxtrain.cli import Exit, main
from fxtrain.diagnosis import collect, hidden, shown_setting

PRIVATE = "s3cr3t-value"


def test_it_names_versions_and_ways_to_communicate():
    groups = collect(
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    )
    assert list(groups) == [
        "torch", "packages", "machine", "topology", "communication", "config", "variables",
    ]  # fmt: skip
    assert groups["packages"]["fxtrain"] == fx.__version__
    assert groups["torch"]["torch_version"] == torch.__version__
    assert "gloo" in groups["communication"]["back ends"]
    assert "lo" in groups["communication"]["interfaces"]
    assert groups["topology"]["this process"] == "rank 1 of 2 (plain)"
    assert groups["variables"]["MASTER_ADDR"] == "127.0.0.1"


def test_a_launcher_that_contradicts_itself_is_told():
    place = collect({"RANK": "5", "WORLD_SIZE": "2"})["topology"]["this process"]
    assert place.startswith("unreadable: RANK")


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
        {"SLURM_JWT": f"eyJhbGciOiJI.{PRIVATE}.sig"},
        {"MPI_PWD": PRIVATE},
        {"TORCH_URL": f"s3://b?X-Amz-Signature={PRIVATE}"},
        {"TORCH_MIRROR": f"https://me:a/b@c{PRIVATE}@host/x"},
        {"RANK": PRIVATE},
        {"RANK": "0", "WORLD_SIZE": PRIVATE},
        {"NCCL_DEBUG": PRIVATE},
        {"FXTRAIN_LAUNCH__ENV": f'["WANDB_KEY={PRIVATE}", "MYPWD={PRIVATE}"]'},
        {"FXTRAIN_LAUNCH__TARGET": f"{PRIVATE}.py"},
        {"FXTRAIN_LAUNCH__MAIN_ADDRESS": PRIVATE},
        {"FXTRAIN_PLAN__STRATEGY__KIND": PRIVATE},
        {"FXTRAIN_PLAN__RECOMPUTE": f'["{PRIVATE}"]'},
        {"FXTRAIN_CONFIG": PRIVATE},
        {"CUDA_X": f"hf_{PRIVATE.replace('-', '')}aaaa"},
    ],
    ids=lambda env: " ".join(env),
)
def test_secrets_are_left_out(env):
    assert PRIVATE not in (said := json.dumps(collect(env)))
    assert PRIVATE.replace("-", "") not in said


NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "NCCL_ANY"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "LD_LIBRARY_PATH", "SLURM_NODELIST"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PJRT_DEVICE", "FXTRAIN_PLAN", "FXTRAIN_CONFIG", "HF_TOKEN"),
    *("FXTRAIN_LAUNCH__RANKS", "FXTRAIN_LAUNCH__TARGET", "FXTRAIN_LAUNCH__ARGS"),
    *("FXTRAIN_LAUNCH__ENV", "FXTRAIN_LAUNCH__LAUNCHER", "FXTRAIN_LAUNCH__LOG_DIR"),
    *("FXTRAIN_LAUNCH__RUN_ID", "FXTRAIN_LAUNCH__OPTIONS__PARTITION", "FXTRAIN_PLAN__SEED"),
    *("FXTRAIN_PLAN__STRATEGY__KIND", "FXTRAIN_PLAN__PRECISION", "FXTRAIN_PLAN__RECOMPUTE"),
)
FORMS = (
    *("{}", '["{}"]', '["A={}"]', '["--key", "{}"]', '["--{}"]', "https://u:{}@h/p", "h?sig={}"),
    *("http://h/p#{}", "-----BEGIN KEY-----\n{}\n-----END KEY-----", "1,{}", "/tmp:{}", "lo {}"),
)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_secret_appears_wherever_it_is(data):
    letters = st.text(string.ascii_letters + string.digits + "-_.+/=", min_size=10, max_size=40)
    word = data.draw(letters.filter(lambda text: not text.isdecimal() and not text.isalpha()))
    secret = f"Zq9{word}"
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    env = {name: data.draw(st.sampled_from(FORMS)).replace("{}", secret) for name in names}
    assert secret not in json.dumps(collect(env), ensure_ascii=False)


def test_plain_values_are_shown():
    for value in ("8", "0,1", "INFO", "^lo,docker0", "12.4.1", "eth0", "INIT,COLL", "2(x4)", ""):
        assert shown_setting("NCCL_X", value) == value
    value = "expandable_segments:True,max_split_size_mb:128"
    assert shown_setting("PYTORCH_CUDA_ALLOC_CONF", value).startswith("e")
    assert shown_setting("PYTHONPATH", "/tmp:/usr/lib", home="/tmp") == "~:/usr/lib"
    assert hidden("NCCL_SOCKET_IFNAME", "eth0") == "eth0"
    assert hidden("X", "/a/b", home="/") == "/a/b"


def test_values_of_the_launch_file_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fxtrain.toml").write_text("[launch]\nranks = 3\n")
    assert main(["env", "--json"]) == Exit.WELL
    told = json.loads(capsys.readouterr().out)
    assert told["config"]["launch.ranks"] == "3"
    assert main(["env"]) == Exit.WELL
    assert "- launch.ranks: 3" in capsys.readouterr().out.splitlines()


MIB = 2**20


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"": ("max", "current", "inactive_file")}),
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7": ("max", "current", "inactive_file")}),
        (
            "4:memory:/docker/7f\n2:cpu,cpuacct:/docker/7f\n0::/\n",
            {"memory": ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")},
        ),
    ],
    ids=["a container", "a job", "a container, version 1"],
)
def test_the_memory_is_that_of_the_container_or_job(groups, files, tmp_path, monkeypatch):
    """What the kernel keeps of files that were read is free."""
    monkeypatch.setattr(_host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(_host_memory, "_GROUPS_OF_THIS", tmp_path / "groups")
    (tmp_path / "groups").write_text(groups)
    for folder, (limit, use, cached) in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"memory.{limit}").write_text(f"{64 * MIB}\n")
        (tmp_path / folder / f"memory.{use}").write_text(f"{60 * MIB}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 7\n{cached} {44 * MIB}\n")
    assert _host_memory.available_memory()[:2] == (48 * MIB, 64 * MIB)
    assert fx.big.budget({"cpu": "100%"}) == {"cpu": 48 * MIB}
    assert "of 0.1 GiB, the limit of this container" in collect({})["machine"]["memory"]
    (tmp_path / "groups").unlink()
    free, total, machine = _host_memory.available_memory()
    assert 0 < free < total == machine
