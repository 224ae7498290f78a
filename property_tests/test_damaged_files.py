"""Files of settings, damaged at random: read, or refused in a few lines that are safe to print."""

import contextlib
import io
import json

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.launchers.config import read_launch_file, render
from fxtrain.state.parsing import parse_yaml
from tests._damage import damaged, misshapen, only
from tests.cli._files import GOOD

PLAN = fx.Plan(
    strategy=fx.FSDP(wrap=("Block",)), precision="bf16", accumulate=2, compile=fx.Compile()
)
LAUNCH = {
    "launch": {"ranks": 2, "args": ["a"]},
    "plan": {"strategy": {"kind": "ddp"}, "accumulate": 4},
}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 4,
    "num_machines": 2, "mixed_precision": "no", "use_cpu": False, "main_process_ip": "10.0.0.1",
    "fsdp_config": {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "Block"},
    "dynamo_config": {"dynamo_backend": "INDUCTOR"}, "tpu_env": [], "main_process_port": None,
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": "auto", "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.99]}},
}  # fmt: skip


def _main(*argv):
    """The command line: an exit code, whatever the file holds, and output that is safe."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(list(argv)) in (0, 1, 2)
    text = out.getvalue() + err.getvalue()
    assert len(text) < 20_000 and all(one.isprintable() or one in "\n\t" for one in text)


def _write(path, raw):
    path.write_bytes(raw) if isinstance(raw, bytes) else path.write_text(raw)
    return path


@pytest.mark.parametrize("form", ["json", "toml", "yaml"])
@given(data=st.data())
def test_a_damaged_plan_is_read_or_refused(folder, form, data):
    path = _write(folder / f"plan.{form}", data.draw(damaged(fx.state.dumps(PLAN, form).encode())))
    only(fx.PlanError, fx.read_plan, path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["toml", "yaml"])
@given(data=st.data())
def test_a_damaged_launch_file_is_read_or_refused(folder, form, data):
    raw = GOOD if form == "toml" else render(LAUNCH, "yaml")
    path = _write(folder / f"launch.{form}", data.draw(damaged(raw.encode())))
    if only(fx.PlanError, read_launch_file, path):
        _main("config", "show", "-c", str(path))
    _main("config", "check", str(path))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bytes", "values"])
@given(data=st.data())
def test_a_damaged_config_of_accelerate_is_converted_or_refused(folder, how, data):
    if how == "bytes":
        raw = data.draw(damaged(yaml.safe_dump(ACCELERATE).encode()))
    else:
        raw = json.dumps(data.draw(misshapen(ACCELERATE)), default=str)
    path = _write(folder / "accelerate.yaml", raw)
    _main("config", "convert", str(path), "--json")
    _main("config", "convert", str(path), str(folder / "made.toml"), "--force")


@pytest.mark.parametrize("how", ["bytes", "values"])
@given(data=st.data())
def test_a_damaged_config_of_deepspeed_is_read_or_refused(folder, how, data):
    if how == "bytes":
        raw = data.draw(damaged(json.dumps(DEEPSPEED).encode()))
    else:
        raw = json.dumps(data.draw(misshapen(DEEPSPEED)), default=str)
    path = _write(folder / "deepspeed.json", raw)
    plan = fx.Plan(strategy=fx.DeepSpeed(config=str(path)), precision="bf16", clip_norm=1.0)
    only(fx.PlanError, fx.interop.deepspeed_config, plan)


@given(data=st.data())
def test_a_damaged_earlier_plan_run_is_read_or_refused(folder, data):
    text = fx.state.dumps(fx.state.DryRun(name="train.py", world=8))
    raw = data.draw(damaged(text.encode())).decode(errors="replace")
    only(fx.PlanError, fx.state.loads, raw, fx.state.DryRun)


# YAML itself

TAGS = st.sampled_from(["", "", "", "!!int ", "!!bool ", "!!float ", "!!null ", "!!str ", "!!map "])
ANCHORS = st.sampled_from(["", "", "&a ", "&b "])
SCALARS = st.one_of(
    st.sampled_from(["", "1", "010", "0x1f", "1_0", "yes", "True", "~", ".inf", "-.inf", ".nan"]),
    st.sampled_from(["2020-01-01", "1e999", "'x'", '"\\ud800"', '"\\U7fffffff"', "*a", "*b", "<<"]),
    st.text(max_size=3),
)
NODES = st.recursive(
    st.tuples(ANCHORS, TAGS, SCALARS).map("".join),
    lambda inner: st.one_of(
        st.tuples(ANCHORS, TAGS, st.lists(inner, max_size=3)).map(
            lambda parts: f"{parts[0]}{parts[1]}[{', '.join(parts[2])}]"
        ),
        st.tuples(ANCHORS, TAGS, st.lists(st.tuples(inner, inner), max_size=3)).map(
            lambda parts: f"{parts[0]}{parts[1]}{{{', '.join(map(': '.join, parts[2]))}}}"
        ),
    ),
    max_leaves=8,
)


@given(text=NODES)
def test_any_yaml_is_what_pyyaml_reads_or_an_error_on_one_line(text):
    try:
        assert repr(parse_yaml(text)) == repr(yaml.safe_load(text))
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1_000


@given(data=st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5),
              st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
))  # fmt: skip
def test_what_pyyaml_writes_is_read_as_it_was(data):
    text = yaml.safe_dump(data, allow_unicode=True)
    assume(yaml.safe_load(text) == data)  # PyYAML itself folds U+0085 into a space
    assert parse_yaml(text) == data
