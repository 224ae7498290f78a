"""What errors say: each sentence once, and everywhere else only codes and values."""

import copy
import os
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.launchers import LaunchSpec, prepare, run
from fxtrain.state import DEVICES, read_device

PART = fx.data.BlendPart(name="web", source=fx.data.NanoGPTTokens(path="a.bin"))
ADDRESS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}


class _Short(Dataset):
    """Claims two rows."""

    def __len__(self):
        return 2

    def __getitem__(self, row):
        raise IndexError("none")


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _step(ctx, loss=lambda model, batch: model(batch.data).mean(), optimizer=_sgd, **fields):
    model = fx.wrap(nn.Linear(2, 1), ctx, fx.Plan(**fields), optimizer=optimizer)
    return fx.step(ctx, fx.batch(torch.ones(2, 2), ctx), fx.StepFns(model=model, loss=loss))


def _nan(model, batch):
    return model(batch.data).mean() * float("nan")


def _closed():
    with fx.detect({}, device="cpu") as ctx:
        return ctx


def _sharded(ctx, rows=(1,)):
    return fx.shard(DataLoader(rows), ctx)


CASES = [
    ("FX003", lambda ctx: copy.deepcopy(fx.wrap(nn.Linear(2, 1), ctx)),
     "copy.deepcopy(model): a wrapped model has optimizers and communicators, which cannot be "
     "copied. To copy the model, use with fx.gathered(model) as net: copy.deepcopy(net). Where"
     " each rank has full weights, copy.deepcopy(model.module) and AveragedModel(model.module)"
     " do too. To store it, use fx.save(path, ctx, model, position=report.position)."),
    ("FX100", lambda ctx: fx.detect({}, device="cpu", timeout_s=0),
     "detect(timeout_s=0): not a timeout. Pass a number of seconds above 0 and at most "
     "1000000."),
    ("FX101", lambda ctx: fx.detect({"RANK": "1"}, device="cpu"),
     "WORLD_SIZE is not set, but RANK=1. Set it for every process, or unset the others to run "
     "alone."),
    ("FX101", lambda ctx: fx.detect(ADDRESS, device="cpu"),
     "MASTER_PORT='x': expected a whole number from 1 to 65535. Set it for every process, or "
     "unset it and the others of its launcher to run alone."),
    ("FX103", lambda ctx: fx.detect({"FXTRAIN_RUN_SECRET": "12345"}, device="cpu"),
     "FXTRAIN_RUN_SECRET has 5 characters, but the secret of a run needs at least 16. Create "
     "one with `openssl rand -hex 32`, the same for every rank."),
    ("FX105", lambda ctx: ops.barrier(_closed()),
     "barrier: this context is closed; call fx.detect() again. fx.close(ctx), or the end of a "
     "`with` block of the context, closed it."),
    ("FX110", lambda ctx: ctx.axis("expert"),
     "ctx.axis('expert'): this context has no such axis. It has data, loss, node, pipeline, "
     "replicate, shard, context, tensor."),
    ("FX110", lambda ctx: fx.detect({}, device="cpu", mesh=fx.Mesh(tensor=2)),
     "Mesh(replicate=-1, tensor=2) describes a multiple of 2 ranks, but this run has 1. Launch"
     " another number of ranks, or set one axis to -1."),
    ("FX200", lambda ctx: fx.Plan(accumulate=0),
     "Plan(accumulate=0): choose a number of at least 1."),
    ("FX200", lambda ctx: fx.Plan(strategy="dpp"),
     "Plan(strategy='dpp'): choose a strategy config, such as fx.FSDP(), or one of 'single', "
     "'ddp', 'fsdp', 'deepspeed', 'pp', 'xla', 'offload'. Did you mean 'pp'?"),
    ("FX200", lambda ctx: fx.Compile(prepack=True, mode="max-autotune"),
     "Compile(prepack=True, backend='inductor', mode='max-autotune'): only inductor prepacks "
     "weights, and torch.compile takes either a mode or such options. Leave backend and mode "
     "out."),
    ("FX200", lambda ctx: _step(ctx, compile=fx.Compile(prepack=True)),
     "wrap(optimizer=...) with Plan(compile=fx.Compile(prepack=True)): prepacked weights are "
     "constants, and an update would not reach them. Leave prepack out for training, or wrap "
     "the model without an optimizer."),
    ("FX200", lambda ctx: fx.diff(fx.Plan(), fx.Position()),
     "diff compares two records of one kind, such as two plans; found a Plan and a Position."),
    ("FX200", lambda ctx: fx.state.Placement(units=(), device="disk"),
     "Placement(device='disk'): nothing computes on disk. Choose a device or 'cpu'."),
    ("FX200", lambda ctx: fx.WandB(init=3),
     "WandB(init=...): choose a table of arguments by name."),
    ("FX200", lambda ctx: fx.data.MegatronOrder(split=(1, 2, 3, 4)),
     "MegatronOrder(split=(1.0, 2.0, 3.0, 4.0)): pass one to three weights of at least 0, such"
     " as (969, 30, 1)."),
    ("FX200", lambda ctx: fx.data.Blend(parts=[PART, PART]),
     "Blend(parts=...): the parts have the names ['web', 'web']. Pass one part or more, each "
     "with a name of its own."),
    ("FX200", lambda ctx: read_device("H10"),
     f"'H10' is no known device; known are {', '.join(DEVICES)}. Use one of these, or a file that "
     f"`fxtrain env --measure device.toml` wrote on such a machine. Did you mean 'H100'?"),
    ("FX200", lambda ctx: ops.seed(-1, ctx),
     "seed(-1): not a seed. Pass an int from 0 to 2**63 - 1."),
    ("FX200", lambda ctx: fx.FSDP(wrap_by="layers"),
     "FSDP(wrap_by='layers'): choose a path such as 'package.module:function'."),
    ("FX200", lambda ctx: fx.release(nn.Linear(2, 1), 3),
     "release takes wrapped models, modules and optimizers, found int. A tensor is freed when "
     "nothing refers to it: use del."),
    ("FX201", lambda ctx: read_device("missing.toml"),
     "missing.toml cannot be read: [Errno 2] No such file or directory: 'missing.toml'."),
    ("FX300", lambda ctx: ops.reduce(torch.ones(1), ctx, op="med"),
     "reduce(op='med'): no such op. Use one of mean, sum, max, min, product."),
    ("FX300", lambda ctx: ops.broadcast(torch.ones(1), ctx, src=3),
     "broadcast(src=3): no such rank. This context has ranks 0 to 0."),
    ("FX304", lambda ctx: ops.broadcast_object(threading.Lock(), ctx),
     "broadcast_object: rank 0 passed a value that cannot be sent: TypeError: cannot pickle "
     "'_thread.lock' object. Send tensors, or objects that pickle."),
    ("FX400", lambda ctx: _sharded(ctx).skip(-1),
     "skip(-1): pass a number of batches, 0 or more."),
    ("FX400", lambda ctx: _sharded(ctx).updates(-1),
     "updates(-1): pass the number of updates of the run, 0 or more."),
    ("FX400", lambda ctx: list(_sharded(ctx, _Short())),
     "iterating: _Short raised IndexError: none. len(dataset) is 2. If it has fewer rows, "
     "return their number from __len__; if a sampler chose the row, make it choose from those."),
    ("FX400", lambda ctx: fx.Mean().update(torch.zeros(2)),
     "Mean.update takes a number, a tensor of one element, fx.Weighted or the report of a "
     "step, found tensor([0., 0.]). Take its mean first."),
    ("FX401", lambda ctx: list(_sharded(ctx).at(fx.Position(index=5))),
     "The position has index 5, but an epoch of this loader ends at 1: the position was made "
     "with other data. Pass the loader that it was made with."),
    ("FX500", lambda ctx: fx.StepFns(model=fx.wrap(nn.Linear(2, 1), ctx), loss=None),
     "StepFns(loss=...) takes a function, found NoneType. For example: lambda model, batch: "
     "F.cross_entropy(model(batch[0]), batch[1])."),
    ("FX501", lambda ctx: _step(ctx, _nan, nonfinite="raise"),
     "Non-finite values before update 1 (epoch 0, index 2):\n"
     "  rank 0: 1 non-finite loss; gradients are non-finite\n"
     "Update skipped. Use Plan(nonfinite=\"skip\") to continue without raising."),
    ("FX502", lambda ctx: _step(ctx, lambda model, batch: model(batch.data)),
     "The loss has shape [2, 1]. Return a scalar: reduce it with .mean(), or use "
     "fx.Weighted(losses.sum(), losses.numel())."),
    ("FX502", lambda ctx: _step(ctx, lambda model, batch: None),
     "The loss is a NoneType, not a tensor. Return a scalar tensor, fx.Weighted(total, "
     "weight), or a pair of either and aux metrics."),
    ("FX502", lambda ctx: _step(ctx, lambda model, batch: model(batch.data).mean().detach()),
     "The loss does not require grad. Compute it from parameters that require grad, outside "
     "torch.no_grad, and do not detach it."),
    ("FX504", lambda ctx: _step(ctx, optimizer=None),
     "step: this model has no optimizer. Wrap it with one: fx.wrap(net, ctx, plan, "
     "optimizer=lambda params: torch.optim.AdamW(params))."),
    ("FX600", lambda ctx: fx.export({"a": 1}, "out", ctx=ctx),
     "export: these tensors cannot be written to a safetensors file:\n"
     "  a is a int, not a tensor"),
    ("FX601", lambda ctx: fx.restore("nowhere", ctx, fx.wrap(nn.Linear(2, 1), ctx)),
     "nowhere was not restored. No checkpoint at nowhere: no such folder. Pass a folder into "
     "which fx.save or fx.fit wrote."),
    ("FX601", lambda ctx: fx.load_model("nowhere", nn.Linear(2, 1)),
     "load_model: 'nowhere' is neither a file nor a folder. Download a model from a hub first."),
    ("FX700", lambda ctx: LaunchSpec(target="/bin/true", executable=True, spares=1, restarts=1),
     "LaunchSpec(spares=1, executable=True): a spare imports the packages of a Python script "
     "or module, and /bin/true is a program. Omit spares."),
    ("FX700", lambda ctx: LaunchSpec(target="train.py", executable=True, module=True),
     "LaunchSpec(module=True, executable=True): a program cannot be both."),
    ("FX700", lambda ctx: prepare(LaunchSpec(target="train.py", nodes=2)),
     "2 nodes need an address to connect to. Set main_address to the host name or address of "
     "node 0, the same on every node."),
    ("FX700", lambda ctx: prepare(LaunchSpec(target="train.py", launcher="slurn")),
     "No launcher 'slurn'. Did you mean 'slurm'? Available: native, mpi, slurm, deepspeed, "
     "tpu, tpu-pod, ray, kubernetes, sagemaker."),
    ("FX700", lambda ctx: fx.launch(divmod, (7, 2), ranks=0),
     "LaunchSpec(ranks=0): choose a whole number of at least 1: one per accelerator, or as "
     "many as there are spare cores."),
    ("FX702", lambda ctx: run(LaunchSpec(target="nowhere.py")),
     "nowhere.py: no such script. The current folder is HERE."),
]  # fmt: skip


@pytest.mark.parametrize(("code", "call", "text"), CASES, ids=[text[:40] for _, _, text in CASES])
def test_an_error_says_what_was_asked_what_was_found_and_what_to_do(
    ctx, code, call, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fx.FxError) as caught:
        call(ctx)
    assert str(caught.value).replace(os.getcwd(), "HERE") == f"{text} [{code}]"
