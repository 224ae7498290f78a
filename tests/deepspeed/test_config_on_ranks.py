"""Optimizer and scheduler from the config, construction in parts, and bad input."""

import shutil
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from tests.deepspeed._ranks import adamw, mean, net, on_rank, rows, train, values

pytestmark = pytest.mark.deepspeed

ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
WARMUP = {
    "type": "WarmupLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "warmup_type": "linear",
    },
}


@on_rank
def _from_config(ctx, stage):
    given = fx.from_config(lr=0.01, weight_decay=0.1)
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage, config={"optimizer": ADAMW}), accumulate=2)
    model, reports = train(ctx, plan, given)
    own, _ = train(ctx, fx.Plan(strategy=fx.DeepSpeed(stage=stage), accumulate=2), adamw)
    params = model.strategy_state.values["optimizer"]["params"]
    kinds = [type(optimizer).__name__ for optimizer in model.optimizers]
    return kinds, params["lr"], values(model), values(own), sum(bool(r.applied) for r in reports)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_from_the_config_trains_like_ones_own(pair, stage):
    for kinds, lr, got, wanted, updates in pair.run(_from_config, stage):
        assert kinds == ["AdamW"] and lr == 0.01 and updates == 4
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@on_rank
def _rates(ctx, stage, own):
    config = {"scheduler": WARMUP}
    optimizer, scheduler = adamw, fx.from_config(lr=0.08, warmup_num_steps=8)
    if own:
        config = {}
        scheduler = lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)  # noqa: E731
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage, config=config), accumulate=2)
    model, _ = train(ctx, plan, optimizer, scheduler=scheduler, epochs=1, n=32)
    return model.optimizer.param_groups[0]["lr"], type(model.scheduler).__name__


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_schedulers_advance_once_per_update(pair, stage):
    # Four micro-batches make two updates.
    assert pair.run(_rates, stage, True) == [(0.01 / 4, "StepLR")] * 2
    # DeepSpeed's own start one step before the first.
    assert pair.run(_rates, stage, False) == [(pytest.approx(0.08 / 8), "WarmupLR")] * 2


OWNERS = {
    "no section": ({}, fx.from_config, None, "has a section 'optimizer'"),
    "two optimizers": ({"optimizer": ADAMW}, adamw, None, "a section 'optimizer'"),
    "no word": ({"scheduler": WARMUP}, adamw, None, "has a section 'scheduler'"),
    "own scheduler": (
        {"optimizer": {"type": "Adam"}},
        fx.from_config,
        "own",
        "DeepSpeed creates the config's optimizer itself",
    ),
    "two models' worth": ({}, "several", None, "steps one optimizer"),
}


def _several(params):
    return [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]


def _own_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@on_rank
def _refusal(ctx, plan, optimizer=None, scheduler=None):
    """The error of wrapping, by kind and words."""
    optimizer = _several if optimizer == "several" else optimizer
    scheduler = _own_scheduler if scheduler == "own" else scheduler
    try:
        fx.wrap(net(), ctx, plan, optimizer=optimizer, scheduler=scheduler)
    except fx.FxError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("name", OWNERS)
def test_who_brings_the_optimizer_must_be_clear(pair, name):
    config, optimizer, scheduler, words = OWNERS[name]
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=1, config=config))
    for kind, message in pair.run(_refusal, plan, optimizer, scheduler):
        assert kind == "PlanError" and words in message


REFUSED = {
    "entries": (fx.Plan(strategy=fx.DeepSpeed(), clip_value=0.1), "Use clip_norm"),
    "open windows": (fx.Plan(strategy=fx.DeepSpeed(), accumulate=2, flush=False), "Use flush=True"),
    "tensor": (fx.Plan(strategy=fx.DeepSpeed(tensor_parallel=2)), "fx.Mesh(tensor=2)"),
    "sequence": (fx.Plan(strategy=fx.DeepSpeed(sequence_parallel=2)), "fx.Mesh(context=2)"),
    "managed": (
        fx.Plan(strategy=fx.DeepSpeed(stage=1, overlap=True), accumulate=2, sync_each=True),
        "sync_each=False",
    ),
    "stage and offload": (
        fx.Plan(strategy=fx.DeepSpeed(stage=1, offload_parameters="cpu")),
        "needs stage 3",
    ),
    "leaves": (
        fx.Plan(strategy=fx.DeepSpeed(stage=3, leaf_modules=("Experts",))),
        "names the class 'Experts', but no submodule of Sequential has it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_cannot_be_is_refused_on_every_rank(pair, name):
    plan, words = REFUSED[name]
    for kind, message in pair.run(_refusal, plan, adamw):
        assert kind == "PlanError" and words in message


@on_rank
def _with_a_file_on_rank_0(ctx, folder, action):
    path = Path(folder, f"config-{ctx.rank}.json")
    if ctx.is_main:
        path.write_text('{"gradient_accumulation_steps": 2}')
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder if ctx.is_main else "/")
        plan = fx.Plan(strategy=fx.DeepSpeed(config="config-0.json"))
        try:
            if action == "wrap":
                fx.wrap(net(), ctx, plan, optimizer=adamw)
            elif action == "shard":
                fx.shard(DataLoader(rows(), batch_size=4), ctx, plan)
            else:
                fx.tuning.find_batch_size(ctx, lambda size, plan: None, 8, plan)
        except fx.PlanError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("action", ["wrap", "shard", "find_batch_size"])
def test_a_file_that_one_rank_lacks_is_the_same_error_on_all(pair, action, tmp_path):
    first, second = pair.run(_with_a_file_on_rank_0, str(tmp_path), action)
    assert first == second and "DeepSpeed(config='config-0.json'): [Errno 2] No such file" in first


@on_rank
def _found_window(ctx, path):
    size, plan = fx.tuning.find_batch_size(
        ctx, lambda size, plan: size <= 4, 8, fx.Plan(strategy=fx.DeepSpeed(config=path))
    )
    model = fx.wrap(net(), ctx, plan, optimizer=adamw)
    fx.shard(DataLoader(rows(), batch_size=size), ctx, plan)
    return size, plan.accumulate, model.strategy_state.values["gradient_accumulation_steps"]


def test_the_window_of_a_file_is_scaled_with_the_batch_size(pair, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 8}')
    assert pair.run(_found_window, str(path)) == [(4, 4, 4)] * 2


@on_rank
def _without_fp16(ctx):
    """What some CPUs lack: `_refusal` on a machine with one."""
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda _self: False):
        return _refusal(ctx, fx.Plan(strategy=fx.DeepSpeed(), precision="fp16"), adamw)


def test_fp16_is_refused_where_the_device_lacks_it(pair):
    for kind, message in pair.run(_without_fp16):
        assert kind == "PlanError" and "does not support fp16 on cpu" in message


@on_rank
def _without_compiler(ctx, choice):
    which = shutil.which
    shutil.which = lambda name, *_: None if ctx.rank == 1 and "ninja" not in name else which(name)
    config = fx.DeepSpeed(stage=2, offload_optimizer="cpu", cpu_optimizer=choice)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = fx.wrap(net(), ctx, fx.Plan(strategy=config), optimizer=adamw)
    except fx.PlanError as error:
        return "PlanError", str(error)
    finally:
        shutil.which = which
    said = [str(one.message) for one in caught if "several times slower" in str(one.message)]
    return type(model.optimizers[0]).__name__, "".join(said)


def test_without_a_compiler_torch_computes_and_says_so(pair):
    for kind, words in pair.run(_without_compiler, "auto"):
        assert kind == "AdamW" and "C++ compiler" in words and "torch's AdamW" in words
    for kind, words in pair.run(_without_compiler, "deepspeed"):
        assert kind == "PlanError" and "C++ compiler" in words
    assert pair.run(_without_compiler, "torch") == [("AdamW", "")] * 2


@on_rank
def _in_parts(ctx, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage, persistence_threshold=0))
    with fx.zero_init(ctx, plan):
        module = net()
    held = sum(parameter.numel() for parameter in module.parameters())
    with fx.zero_init(ctx, fx.Plan()):
        assert sum(parameter.numel() for parameter in net().parameters()) == 210
    model = fx.wrap(module, ctx, plan, optimizer=adamw)
    loader = fx.shard(DataLoader(rows(), batch_size=4), ctx, plan)
    fns = fx.StepFns(model=model, loss=mean)
    for batch in loader:
        fx.step(ctx, batch, fns)
    usual, _ = train(ctx, fx.Plan(), adamw, epochs=1)
    return held, values(model), [p.detach() for p in usual.parameters()]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_built_in_parts_trains_like_a_whole_one(pair, stage):
    for held, got, wanted in pair.run(_in_parts, stage):
        assert held == (0 if stage == 3 else 210)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@on_rank
def _by_hand(ctx, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), accumulate=2)
    model = fx.wrap(net(), ctx, plan, optimizer=adamw)
    x, y = rows(32).tensors
    mine = slice(ctx.rank, None, ctx.world_size)
    norms = []
    for _ in range(3):
        for part in range(2):
            half = slice(part * 8, part * 8 + 8)
            ops.backward(mean(model, (x[mine][half], y[mine][half])), model)
        done = ops.apply(model, fx.state.UpdateSpec(clip_norm=0.1))
        norms.append(float(done.grad_norm))
    refused = []
    for call in (lambda: ops.clip_norm(model, 1.0), lambda: ops.scale_grads(model, 0.5)):
        with pytest.raises(fx.PlanError) as found:
            call()
        refused.append(str(found.value))
    return norms, values(model), refused, model.strategy_state.values["gradient_accumulation_steps"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_by_hand_gives_the_same(pair, clusters, stage):
    module = net()
    optimizer = adamw(module.parameters())
    x, y = rows(32).tensors
    wanted = []
    for _ in range(3):
        mean(module, (x, y)).backward()
        wanted.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    for norms, got, refused, accumulate in pair.run(_by_hand, stage):
        assert norms == pytest.approx(wanted, rel=1e-4) and accumulate == 2
        assert all("ops.apply(model, UpdateSpec(" in message for message in refused)
        for a, b in zip(got, module.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
