"""The command line is the one of DeepSpeed's own runner."""

import shlex
import types

import pytest

from fxtrain.cli import main
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.built_in.deepspeed import filter_hosts, pdsh_argv, read_hosts

pytestmark = pytest.mark.deepspeed

LAUNCH = """
[launch]
ranks = 2
[plan]
precision = "bf16"
[plan.strategy]
kind = "deepspeed"
"""
TEXT = "a slots=4\nb slots=2\nc slots=1\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("include", "exclude"),
    [("", ""), ("a:1,3@b", ""), ("", "a@b:0"), ("c@b:1,0", "")],
)
def test_machines_slots_and_words_are_those_of_deepspeed(include, exclude, monkeypatch, tmp_path):
    from deepspeed.launcher import runner
    from deepspeed.launcher.multinode_runner import PDSHRunner

    theirs = runner.parse_inclusion_exclusion(
        runner._parse_hostfile(TEXT.splitlines()), include, exclude
    )
    hosts = filter_hosts(read_hosts(TEXT), include, exclude)
    assert {host: list(slots) for host, slots in hosts.items()} == dict(theirs)
    assert list(hosts) == list(theirs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", "/env/python")
    options = types.SimpleNamespace(
        user_args=["--name", "two words"],
        user_script="train.py",
        launcher_args="",
        ssh_port=None,
        master_addr="a",
        master_port=29500,
        venv_script=None,
        no_python=False,
        module=False,
        no_local_rank=True,
        save_pid=False,
        enable_each_rank_log=None,
    )
    pdsh = PDSHRunner(options, runner.encode_world_info(theirs))
    pdsh.add_export("NAME", "value")
    words, _, environment = pdsh.get_cmd({}, theirs)
    spec = LaunchSpec(
        target="train.py", args=("--name", "two words"), main_address="a", env=("NAME=value",)
    )
    argv = pdsh_argv(spec, hosts, folder=str(tmp_path), python="/env/python")
    # As the shells over there split them: DeepSpeed quotes only what holds a space.
    assert shlex.split(" ".join(argv)) == shlex.split(" ".join(words))
    assert environment == {"PDSH_RCMD_TYPE": "ssh"}


def test_a_file_for_gpus_is_valid_on_a_machine_without_one(tmp_path, capsys):
    path = tmp_path / "fxtrain.toml"
    path.write_text(LAUNCH)
    assert main(["config", "check", str(path)]) == 0, capsys.readouterr().out
    path.write_text(LAUNCH.replace("bf16", "fp16"))
    assert main(["config", "check", str(path)]) == 0, capsys.readouterr().out
