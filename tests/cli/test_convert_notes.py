"""`fxtrain config convert`: what it says of settings without a counterpart, and where it reads."""

import json

from fxtrain.cli import Exit, main
from fxtrain.interop.accelerate_config import convert_accelerate
from fxtrain.launchers.config import read_launch_file
from tests.cli._accelerate_configs import DEEPSPEED, ONE


def _notes(old):
    return {key: text for key, _, text in convert_accelerate(old)[1]}


def test_a_stage_3_config_names_the_block_in_which_a_model_is_made():
    assert "fx.zero_init(ctx, plan)" in _notes(DEEPSPEED)["deepspeed.zero3_init_flag"]


def test_without_a_source_it_is_the_one_that_accelerate_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert main(["config", "convert"]) == Exit.WRONG
    assert "hf/accelerate/default_config.yaml" in capsys.readouterr().err
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text(json.dumps(DEEPSPEED))
    assert main(["config", "convert"]) == Exit.WELL
    assert read_launch_file("fxtrain.toml").plan.accumulate == 2


def test_notes_say_what_becomes_of_a_setting():
    section = {"backend": "MSAMP", "override_linear_precision": [True], "opt_level": "O1"}
    old = {**ONE, "distributed_type": "NO", "mixed_precision": "fp8", "fp8_config": section}
    notes = _notes(old)
    assert "torchao's float8 is used instead" in notes["fp8.backend"]
    assert "ignores it" in notes["fp8.override_linear_precision"]
    assert "MS-AMP is no longer maintained" in notes["fp8.opt_level"]
    unknown = {**old, "fp8_config": {"backend": "FOO"}, "no_such_key": 1}
    notes = _notes(unknown)
    assert "plan.precision.recipe" in notes["fp8.backend"]
    assert notes["no_such_key"] == "it has no counterpart"
