"""Quantized weights that FSDP splits over ranks: they compute and train as replicas do."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxtrain as fx
from fxtrain.precision.quantizing import stored_tensors
from fxtrain.testing import Transformer
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import UP
from tests.precision._records import RECORDS, marked

MODES = {"full": ["bnb8", "nf4", "fp4"], "grads_and_optimizer": ["bnb8", "nf4"]}
SPLIT = [
    pytest.param(mode, *one.values, marks=one.marks)
    for mode, names in MODES.items()
    for one in marked(names)
]
TOKENS = torch.arange(32).view(4, 8) % 24


def _net(seed=0, **options):
    net = Transformer(seed=seed, dtype=torch.float32, width=32, **options).requires_grad_(False)
    net.position.requires_grad_(True)
    return net


def _plan(strategy, name, **fields):
    return fx.Plan(strategy=strategy, quantize=RECORDS[name], **fields)


def _wrapped(ctx, plan, seed=0, net=None):
    net = _net(seed) if net is None else net
    return fx.wrap(net, ctx, plan, optimizer=lambda some: torch.optim.SGD(some, lr=0.5))


def _train(ctx, model, count=3):
    def loss(model, batch):
        return F.cross_entropy(model(batch.data).flatten(0, 1), batch.data.flatten())

    fns = fx.StepFns(model=model, loss=loss)
    rows = TOKENS.repeat(count, 1)
    some = fx.shard(torch.utils.data.DataLoader(rows, batch_size=2), ctx, model.plan)
    return [fx.step(ctx, batch, fns).loss.item() for batch in some]


def _bytes(tensors):
    return {name: one.detach().clone().reshape(-1).view(torch.uint8) for name, one in tensors}


def _run(ctx, strategy, name, folder):
    """What a model with other values on each rank computes, holds, saves and gives back."""
    plan = _plan(strategy, name)
    model = _wrapped(ctx, plan, seed=ctx.rank)
    held = sum(
        one.to_local().nbytes if hasattr(one, "to_local") else one.nbytes
        for one in (part.weight for _, part in model.module.named_modules() if _packs(part))
    )
    with torch.no_grad():
        before = model(TOKENS)
    losses = _train(ctx, model)
    fx.save(f"{folder}/run", ctx, model, position=fx.Position())
    other = _wrapped(ctx, plan, seed=5)
    fx.restore(f"{folder}/run", ctx, other)
    same = _train(ctx, other) == _train(ctx, model)
    fx.export(model, f"{folder}/export")
    after = _bytes(fx.weights(model))
    with torch.no_grad():
        wanted = model(TOKENS)
        with fx.gathered(model) as lent:
            equal = torch.equal(lent(TOKENS), wanted)
        equal = equal and torch.equal(model(TOKENS), wanted)
        module = fx.unwrap(model)
        equal = equal and torch.equal(module(TOKENS), wanted)
    kinds = sorted({type(part.weight).__name__ for part in module.modules() if _packs(part)})
    given_back = _bytes(stored_tensors(module).items())
    return before, losses, after, same and equal, held, kinds, given_back


def _packs(part):
    return isinstance(part, nn.Linear) and not part.weight.is_floating_point()


@pytest.mark.parametrize(("mode", "name"), slow_after(1, SPLIT))
def test_shards_compute_and_train_as_replicas_do(pair, name, mode, tmp_path):
    wanted = pair.run(_run, fx.DDP(), name, str(tmp_path / "ddp"))
    found = pair.run(_run, fx.FSDP(mode=mode), name, str(tmp_path / "fsdp"))
    for mine, reference in zip(found, wanted, strict=True):
        before, losses, after, same, held, kinds, module = mine
        assert torch.equal(before, reference[0])
        assert losses == pytest.approx(reference[1], rel=1e-5) and losses[-1] < losses[0]
        assert same and kinds == reference[5]
        assert held == reference[4] / 2
        for key, value in reference[2].items():
            assert key == "position" or torch.equal(after[key], value), key
        assert all(torch.equal(value, after[key]) for key, value in module.items())
    fresh = _net(7)
    fx.load_model(tmp_path / "fsdp" / "export", fresh)
    read = _bytes(stored_tensors(fresh).items())
    assert all(torch.equal(read[key], value) for key, value in found[0][6].items())
    with fx.detect(env={}, device="cpu") as ctx:  # one rank, from the checkpoint of two
        alone = _wrapped(ctx, _plan(fx.Single(), name), seed=3)
        fx.restore(tmp_path / "fsdp" / "run", ctx, alone)
        read = _bytes(stored_tensors(alone.module).items())
    assert all(torch.equal(read[key], found[0][6][key]) for key in read.keys() - {"position"})


def _digests(ctx, name, folder):
    """What a checkpoint takes, and what a model over another base says to it."""
    plan = _plan(fx.FSDP(), name, frozen="digests")
    model = _wrapped(ctx, plan)
    _train(ctx, model)
    fx.save(folder, ctx, model, position=fx.Position())
    other = _wrapped(ctx, plan)
    fx.restore(folder, ctx, other)
    same = _train(ctx, other) == _train(ctx, model)
    with raises_code("FX603") as found:
        fx.restore(folder, ctx, _wrapped(ctx, plan, seed=1))
    return same, str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(["nf4"]))
def test_a_checkpoint_of_shards_may_hold_digests_of_the_base(pair, name, tmp_path):
    (one, told), (other, also) = pair.run(_digests, name, str(tmp_path))
    assert one and other and told == also and "such as" in told
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert size < 40_000  # of which random states take most; the base takes 27,000
    with fx.detect(env={}, device="cpu") as ctx:
        alone = _wrapped(ctx, _plan(fx.Single(), name, frozen="digests"))
        fx.restore(tmp_path, ctx, alone)


def _rehearsed(plan, ctx):
    model = _wrapped(ctx, plan)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    for batch in fx.shard(torch.utils.data.DataLoader(TOKENS.repeat(16, 1)), ctx, plan):
        fx.step(ctx, batch, fns)


def _held(ctx, plan):
    tensors = stored_tensors(_wrapped(ctx, plan).module).values()
    kept = {id(one): getattr(one, "_local_tensor", one).nbytes for one in tensors}
    return sum(kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_after(1, marked(["nf4", "bnb8"])))
def test_a_dry_run_counts_what_a_rank_holds(pair, name):
    plan = _plan(fx.FSDP(), name)
    told = fx.dry_run(functools.partial(_rehearsed, plan), world=2)
    assert told.problems == () and told.memory.parameters == pair.run(_held, plan)[0]


def _offloaded(ctx, name, folder):
    """Shards in host memory, filled from files after wrapping."""
    model = _wrapped(ctx, _plan(fx.FSDP(offload=True), name), seed=4)
    fx.load_model(folder, model)
    with torch.no_grad():
        before = model(TOKENS)
    return before, _train(ctx, model)


@pytest.mark.parametrize("name", marked(["nf4"]))
def test_shards_in_host_memory_are_filled_from_files(pair, name, tmp_path):
    with fx.detect(env={}, device="cpu") as ctx:
        alone = _wrapped(ctx, _plan(fx.Single(), name))
        fx.export(alone, tmp_path)
        wanted = alone(TOKENS)
    (one, losses), (other, _) = pair.run(_offloaded, name, str(tmp_path))
    assert torch.equal(one, wanted) and torch.equal(other, wanted) and losses[-1] < losses[0]


def _refused(ctx, mesh, make):
    with fx.detect({}, device="cpu", mesh=mesh, timeout_s=60) as placed:
        net = make()
        parts = [(id(part), type(part)) for part in net.modules()]
        tensor = fx.TP(styles=(UP,)) if mesh.tensor > 1 else None
        with pytest.raises(fx.PlanError) as found:
            _wrapped(placed, _plan(fx.FSDP(tensor=tensor), "nf4"), net=net)
        assert parts == [(id(part), type(part)) for part in net.modules()]
        return str(found.value)


def _on_meta():
    with torch.device("meta"):
        return _net()


def _of_the_library():
    """A layer as bitsandbytes' users make it."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(32, 32, quant_type="nf4", compute_dtype=torch.bfloat16)
    net = nn.ModuleDict({"layer": layer.to("cpu"), "head": nn.Linear(32, 4)}).requires_grad_(False)
    net["head"].requires_grad_(True)
    return net


@pytest.mark.parametrize(
    ("mesh", "make", "words"),
    [
        (fx.Mesh(), _on_meta, "Fill it before fx.wrap, with fx.load_model"),
        (fx.Mesh(), _of_the_library, "layer was quantized by another library"),
        (fx.Mesh(tensor=2), _net, r"FSDP() without a tensor axis"),
    ],
    ids=["meta", "library", "tensor"],
)
@pytest.mark.parametrize("name", marked(["nf4"]))
def test_what_cannot_be_split_is_refused_before_anything_changes(pair, mesh, make, words, name):
    one, other = pair.run(_refused, mesh, make)
    assert one == other and words in one
