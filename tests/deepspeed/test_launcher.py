"""The command line is one that DeepSpeed's runner reads."""

import pytest

from fxtrain.cli import main
from fxtrain.launchers import DeepSpeedOptions, LaunchSpec, Machine
from fxtrain.launchers.built_in.deepspeed import deepspeed

pytestmark = pytest.mark.deepspeed

LAUNCH = """
[launch]
ranks = 2
[plan]
precision = "bf16"
[plan.strategy]
kind = "deepspeed"
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_deepspeeds_runner_knows_the_options():
    from deepspeed.launcher import runner

    options = DeepSpeedOptions(hostfile="hosts", include="a:1", runner_args=("-x", "y z"))
    spec = LaunchSpec(
        target="train.py", args=("--lr", "1"), main_address="a", module=True, options=options
    )
    args = runner.parse_args(deepspeed(spec, Machine()).argv[3:])
    assert (args.hostfile, args.include, args.master_addr) == ("hosts", "a:1", "a")
    assert (args.launcher_args, args.user_script) == ("-x 'y z'", "train.py")
    assert args.module and args.no_ssh_check and args.no_local_rank
    assert args.user_args == ["--lr", "1"]


def test_a_file_for_gpus_is_valid_on_a_machine_without_one(tmp_path, capsys):
    path = tmp_path / "fxtrain.toml"
    path.write_text(LAUNCH)
    assert main(["config", "check", str(path)]) == 0, capsys.readouterr().out
    path.write_text(LAUNCH.replace("bf16", "fp16"))
    assert main(["config", "check", str(path)]) == 0, capsys.readouterr().out
