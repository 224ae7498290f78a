"""The config that DeepSpeed gets: a pure function of plan, file, model, loader and ranks."""

import json
import logging
import sys
import types
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.backends.deepspeed.config import config_problems
from tests._errors import raises_code

# A file as users of other libraries have it, all of it "auto".
FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}
VALUES = fx.from_config(lr=3e-4, weight_decay=0.1, warmup_num_steps=10, total_num_steps=100)
LOADER = DataLoader(torch.arange(64), batch_size=8)


def _model(**fields):
    module = torch.nn.Linear(2, 2)
    module.config = SimpleNamespace(**fields)
    return module


def _plan(config=None, *, fields=None, **kwargs):
    return fx.Plan(strategy=fx.DeepSpeed(config=config, **(fields or {})), **kwargs)


def test_every_auto_gets_the_value_that_users_of_such_files_expect():
    plan = _plan(FILE, precision="bf16", accumulate=4, clip_norm=1.0)
    got = fx.interop.deepspeed_config(plan, _model(hidden_size=64), LOADER, ranks=2, values=VALUES)
    assert got["train_micro_batch_size_per_gpu"] == 8 and got["train_batch_size"] == 64
    assert got["gradient_accumulation_steps"] == 4 and got["gradient_clipping"] == 1.0
    assert got["bf16"] == {"enabled": True} and got["fp16"] == {"enabled": False}
    zero = got["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert zero["stage3_param_persistence_threshold"] == 640
    assert zero["offload_optimizer"] == {}
    assert got["optimizer"]["params"] == {"lr": 3e-4, "weight_decay": 0.1}
    assert got["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 3e-4,
        "warmup_num_steps": 10,
        "total_num_steps": 100,
    }
    assert '"auto"' not in json.dumps(got)


@pytest.mark.parametrize(
    ("fields", "hidden"),
    [
        ({"hidden_size": 32}, 32),
        ({"hidden_sizes": [16, 48]}, 48),
        ({"text_config": SimpleNamespace(hidden_size=24)}, 24),
        ({"text_config": {"hidden_sizes": (8, 12)}}, 12),
    ],
)
def test_the_hidden_size_is_found_where_models_keep_it(fields, hidden):
    plan = _plan({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    got = fx.interop.deepspeed_config(plan, _model(**fields))
    assert got["zero_optimization"]["reduce_bucket_size"] == hidden * hidden


def test_without_a_hidden_size_the_three_entries_are_named():
    with pytest.raises(fx.PlanError) as found:
        fx.interop.deepspeed_config(_plan(FILE), torch.nn.Linear(2, 2), values=VALUES)
    for name in (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    ):
        assert name in str(found.value)


def test_all_differences_are_listed_at_once():
    file = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 1, "overlap_comm": False},
    }
    plan = _plan(file, fields={"stage": 2, "overlap": True}, precision="bf16", accumulate=4)
    plan = attrs.evolve(plan, clip_norm=1.0)
    with pytest.raises(fx.PlanError) as found:
        fx.interop.deepspeed_config(plan, loader=LOADER)
    lines = str(found.value).splitlines()[1:-1]
    assert [line.split(":")[0].strip() for line in lines] == [
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.overlap_comm",
        "train_micro_batch_size_per_gpu",
    ]
    assert "Plan.accumulate has 4, the config has 2" in lines[0]


def test_batch_sizes_follow_from_each_other():
    rows = lambda **file: fx.interop.deepspeed_config(_plan(file, accumulate=2), ranks=3)  # noqa: E731
    assert rows(train_batch_size=24)["train_micro_batch_size_per_gpu"] == 4
    assert rows(train_micro_batch_size_per_gpu=5)["train_batch_size"] == 30
    with raises_code("FX200", "24", "25"):
        rows(train_batch_size=25)
    for wrong in ("many", 0, True, 2.5):
        with raises_code("FX200", "train_batch_size="):
            rows(train_batch_size=wrong)
    both = _plan(fields={"micro_batch": 4})
    with raises_code("FX200", "micro_batch"):
        fx.interop.deepspeed_config(both, loader=LOADER)
    whole = fx.interop.deepspeed_config(_plan(batch="global"), loader=LOADER, ranks=4)
    assert whole["train_micro_batch_size_per_gpu"] == 2 and whole["train_batch_size"] == 8


def test_an_auto_without_a_value_is_named_with_what_gives_it():
    with raises_code("FX200", "from_config(lr="):
        fx.interop.deepspeed_config(
            _plan({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}})
        )
    with raises_code("FX200", "aio.block_size"):
        fx.interop.deepspeed_config(_plan({"aio": {"block_size": "auto"}}))
    own = {"data_types": {"keep_in_fp32_modules": "auto"}}
    assert fx.interop.deepspeed_config(_plan(own))["data_types"] == own["data_types"]


def test_what_is_not_known_here_passes_through():
    file = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "super_offload": True},
        },
        "wall_clock_breakdown": True,
    }
    got = fx.interop.deepspeed_config(_plan(file))
    assert got["zero_optimization"] == file["zero_optimization"] and got["wall_clock_breakdown"]
    assert got["managed_gradient_accumulation"] is False
    own = {"topk_ratio": 0.1, "select_strategy": "auto", "update_interval": "auto"}
    got = fx.interop.deepspeed_config(_plan({"zero_optimization": {"stage": 2, "zenflow": own}}))
    assert got["zero_optimization"]["zenflow"] == own
    assert "managed_gradient_accumulation" not in got


def test_torch_autocast_in_the_file_stands_for_the_precision():
    file = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert "bf16" not in fx.interop.deepspeed_config(_plan(file, precision="bf16"))
    with raises_code("FX200", "torch_autocast", "'fp16'"):
        fx.interop.deepspeed_config(_plan(file, precision="fp16"))


FILES = [
    ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
    ({"bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, {"precision": "bf16"}),
    ({"fp16": {"enabled": True}}, {"precision": "fp16"}),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"precision": "bf16"}),
    ({"gradient_accumulation_steps": 4, "gradient_clipping": 1}, {"accumulate": 4, "clip_norm": 1}),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, {"accumulate": 8}),
    ({"gradient_clipping": 0, "bf16": {"enabled": "auto"}}, {}),
]


@pytest.mark.parametrize(("file", "fields"), FILES, ids=range(len(FILES)))
def test_a_plan_takes_from_the_file_what_it_leaves_at_its_default(file, fields, caplog):
    wanted = _plan(file, **fields)
    assert fx.interop.deepspeed_config(_plan(file)) == fx.interop.deepspeed_config(wanted)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    with caplog.at_level(logging.INFO), fx.detect(env={}, device="cpu") as ctx:
        assert fx.shard(loader, ctx, _plan(file)).plan == wanted
        assert fx.shard(loader, ctx, _plan(file)).plan == wanted
    assert len(caplog.messages) == bool(fields)
    assert all(name in caplog.text for name in fields)


def test_a_conflict_names_the_precision_of_the_plan():
    with raises_code("FX200", "bf16", "'fp16'"):
        fx.interop.deepspeed_config(_plan({"bf16": {"enabled": True}}, precision="fp16"))


def test_the_peak_of_a_warm_up_has_a_value_of_its_own():
    file = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}
    for values, peak in (({"lr": 0.1}, 0.1), ({"warmup_max_lr": 0.2, "lr": 0.1}, 0.2)):
        found = fx.interop.deepspeed_config(_plan(file), values=fx.from_config(**values))
        assert found["scheduler"]["params"]["warmup_max_lr"] == peak
    with raises_code("FX200", "from_config(warmup_max_lr="):
        fx.interop.deepspeed_config(_plan(file))
    file["scheduler"]["params"] = {"cycle_max_lr": "auto"}  # fx.from_config does not have it
    with pytest.raises(fx.PlanError) as error:
        fx.interop.deepspeed_config(_plan(file))
    assert "cycle_max_lr" in str(error.value) and "from_config" not in str(error.value)


def test_fp16_scales_as_torch_does():
    got = fx.interop.deepspeed_config(_plan(precision="fp16"))["fp16"]
    assert got["initial_scale_power"] == 16 and got["loss_scale_window"] == 2000
    assert got["hysteresis"] == 1 and got["loss_scale"] == 0
    # A file's section means what it means to DeepSpeed, whose defaults are others.
    for enabled, options in ((True, {}), ("auto", {"precision": "fp16"})):
        file = {"fp16": {"enabled": enabled, "min_loss_scale": 4}}
        own = fx.interop.deepspeed_config(_plan(file, **options))["fp16"]
        assert own == {"enabled": True, "min_loss_scale": 4}
    slow = fx.Precision(compute="fp16", scale=fx.LossScale(interval=7))
    got = fx.interop.deepspeed_config(_plan({"fp16": {"hysteresis": 3}}, precision=slow))["fp16"]
    assert got["loss_scale_window"] == 7 and got["hysteresis"] == 3
    odd = fx.Precision(compute="fp16", scale=fx.LossScale(initial=1000.0))
    with raises_code("FX200", "power of two"):
        fx.interop.deepspeed_config(_plan(precision=odd))


MISFITS = {
    "no states to offload": ({"stage": 0, "offload_optimizer": "cpu"}, "stage 1, 2 or 3"),
    "states on nvme": (
        {"stage": 2, "offload_optimizer": "nvme", "nvme_path": "/tmp"},
        "offload_optimizer='nvme' needs stage 3",
    ),
    "parameters": ({"stage": 2, "offload_parameters": "cpu"}, "needs stage 3"),
    "no path": ({"stage": 3, "offload_parameters": "nvme"}, "nvme_path"),
    "copies": ({"stage": 2, "partial_ranks": 2}, "partial_ranks=2 needs stage 3"),
    "odd copies": ({"stage": 3, "partial_ranks": 3}, "must divide the 4"),
    "weights": ({"stage": 1, "quantized_weights": True}, "quantized_weights"),
    "gradients": ({"stage": 2, "quantized_gradients": True}, "quantized_gradients"),
    "sequences": ({"stage": 3, "sequence_parallel": 2}, "sequence_parallel=2 needs stage 0, 1"),
    "leaves": ({"stage": 2, "leaf_modules": ("MoE",)}, "leaf_modules"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_go_together_is_refused(name):
    fields, words = MISFITS[name]
    with pytest.raises(fx.PlanError, match=words):
        fx.interop.deepspeed_config(_plan(fields=fields), ranks=4)


def test_a_sum_over_ranks_is_refused():
    assert config_problems({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 1}}, 2)


BAD = {
    "no file": ("nowhere.json", "No such file"),
    "broken text": ('{"a": ', "but is invalid"),
    "a set": ({"a": {1, 2}}, "only contains JSON values"),
    "not a number": ({"a": float("nan")}, "only contains JSON values"),
    "a flag for a table": ({"zero_optimization": True}, "needs a table"),
    "a stage in quotes": ({"zero_optimization": {"stage": "3"}}, "Use 0, 1, 2 or 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_is_none_is_refused(name):
    config, words = BAD[name]
    with pytest.raises(fx.PlanError, match=words):
        fx.interop.deepspeed_config(_plan(config))


def test_files_are_read(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert fx.interop.deepspeed_config(_plan(str(path)))["zero_optimization"] == {"stage": 1}
    for text, words in (("[1]", "holds a list"), ("nothing", "is not JSON")):
        path.write_text(text)
        with pytest.raises(fx.PlanError, match=words):
            fx.interop.deepspeed_config(_plan(str(path)))


def test_equal_configs_make_equal_plans():
    one = _plan({"b": 1, "a": {"d": 2, "c": 3}})
    two = _plan('{"a": {"c": 3, "d": 2},   "b": 1}')
    assert one == two and hash(one) == hash(two) and fx.fingerprint(one) == fx.fingerprint(two)
    assert fx.state.loads(fx.state.dumps(one)) == one


def test_from_config_is_refused_where_no_config_is():
    with fx.detect({}, device="cpu") as ctx:
        for word in (fx.from_config, fx.from_config(lr=0.1)):
            with raises_code("FX200", "DeepSpeed(config"):
                fx.wrap(torch.nn.Linear(2, 2), ctx, optimizer=word)
    with pytest.raises(TypeError, match="learning_rate"):
        fx.from_config(learning_rate=0.1)
    with raises_code("FX200", "DDP"):
        fx.interop.deepspeed_config(fx.Plan())


def _wrap():
    with fx.detect({}, device="cpu") as ctx:
        fx.wrap(torch.nn.Linear(2, 2), ctx, fx.Plan(strategy=fx.DeepSpeed()))


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with raises_code("FX800", "'fxtrain[deepspeed]'"):
        _wrap()


def test_an_old_package_names_the_command(monkeypatch):
    old = types.ModuleType("deepspeed")
    old.__version__ = "0.14.4"
    monkeypatch.setitem(sys.modules, "deepspeed", old)
    with raises_code("FX800", "0.14.4"):
        _wrap()
