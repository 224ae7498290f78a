"""Whole weights while training goes on, and a handle that is closed."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh
from tests.cluster._models import PIPELINES

FSDP = fx.FSDP(min_params=1)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def _adam(params):
    return torch.optim.AdamW(params, lr=0.01)


def _made(ctx, strategy, net=None, **options):
    plan = fx.Plan(strategy=strategy, **options)
    model = fx.wrap(_net() if net is None else net, ctx, plan, optimizer=_adam)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]).square().mean())
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return model, fns, fx.shard(DataLoader(TensorDataset(rows), batch_size=4), ctx, plan)


CALLS = {
    "step": lambda ctx, model, fns, batch, folder: fx.step(ctx, batch, fns),
    "calling the model": lambda ctx, model, fns, batch, folder: model(batch[0]),
    "train": lambda ctx, model, fns, batch, folder: model.train(),
    "eval": lambda ctx, model, fns, batch, folder: model.eval(),
    "parameters": lambda ctx, model, fns, batch, folder: model.parameters(),
    "save": lambda ctx, model, fns, batch, folder: fx.save(folder, ctx, model),
    "restore": lambda ctx, model, fns, batch, folder: fx.restore(folder, ctx, model),
    "export": lambda ctx, model, fns, batch, folder: fx.export(model, folder),
    "load_model": lambda ctx, model, fns, batch, folder: fx.load_model({}, model),
    "weights": lambda ctx, model, fns, batch, folder: fx.weights(model),
    "gathered": lambda ctx, model, fns, batch, folder: fx.gathered(model).__enter__(),
    "unwrap": lambda ctx, model, fns, batch, folder: fx.unwrap(model),
    "ops.sync": lambda ctx, model, fns, batch, folder: fx.ops.sync(model),
    "ops.backward": lambda ctx, model, fns, batch, folder: fx.ops.backward(
        torch.ones((), requires_grad=True), model
    ),
    "ops.clip_norm": lambda ctx, model, fns, batch, folder: fx.ops.clip_norm(model, 1.0),
    "ops.clip_value": lambda ctx, model, fns, batch, folder: fx.ops.clip_value(model, 1.0),
    "ops.scale_grads": lambda ctx, model, fns, batch, folder: fx.ops.scale_grads(model, 1.0),
    "ops.apply": lambda ctx, model, fns, batch, folder: fx.ops.apply(model),
    "ops.average": lambda ctx, model, fns, batch, folder: fx.ops.average(model),
}


def _refusals(*given):
    """What each call says of the handle; None where it is silent."""
    found = {}
    for name, call in CALLS.items():
        try:
            call(*given)
            found[name] = None
        except fx.FxError as error:
            found[name] = str(error)
    return found


def _closed(ctx, strategy, folder):
    model, fns, loader = _made(ctx, strategy)
    batch = next(iter(loader))
    fx.step(ctx, batch, fns)
    with fx.gathered(model):
        lent = _refusals(ctx, model, fns, batch, folder)
    fx.step(ctx, batch, fns)
    fx.unwrap(model)
    return lent, _refusals(ctx, model, fns, batch, folder)


@pytest.mark.parametrize(
    ("n", "strategy"),
    [(1, fx.Single()), (1, FSDP), (2, fx.DDP()), (2, fx.DDP(shard_optimizer=True)), (2, FSDP)],
    ids=lambda one: type(one).__name__ if not isinstance(one, int) else str(one),
)
def test_a_closed_handle_says_what_to_do(clusters, tmp_path, n, strategy):
    for lent, spent in clusters[n].run(_closed, strategy, str(tmp_path / "a")):
        for name in CALLS:
            assert "inside fx.gathered, which puts full weights" in lent[name], (name, lent[name])
            assert "this model was unwrapped" in spent[name], (name, spent[name])
            assert "fx.weights(model)" in spent[name]
            assert name.split(".")[-1] in spent[name].split(":")[0]
    assert not (tmp_path / "a").exists()


def _copy_of_handle(ctx):
    import attrs

    model, _, _ = _made(ctx, fx.Single())
    other = attrs.evolve(model, scheduler=None)
    fx.unwrap(model)
    other(torch.ones(2, 8))


def test_a_copy_of_the_handle_is_closed_too(clusters):
    with pytest.raises(fx.StepError, match=r"this model was unwrapped"):
        clusters[1].run(_copy_of_handle)


def _unwrapped_in_a_window(ctx, strategy):
    model, fns, loader = _made(ctx, strategy, accumulate=2)
    applied = fx.step(ctx, next(iter(loader)), fns).applied
    wanted = dict(fx.weights(model))
    net = fx.unwrap(model)
    grads = [parameter.grad for parameter in net.parameters()]
    same = all(torch.equal(value, wanted[name]) for name, value in net.state_dict().items())
    return applied, same or ctx.rank, grads


@pytest.mark.parametrize("strategy", [fx.DDP(), FSDP], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("n", [1, 2])
def test_unwrap_drops_an_open_window(clusters, n, strategy):
    for applied, same, grads in clusters[n].run(_unwrapped_in_a_window, strategy):
        assert not applied
        assert same
        assert grads == [None] * len(grads)


def _chosen(ctx, strategy):
    model, _, _ = _made(ctx, strategy)
    state = model.module.state_dict()
    some = {name: t.tolist() for name, t in fx.weights(model, names=["3.*", "1.running_mean"])}
    cast = {t.device.type for _, t in fx.weights(model, device="cpu")}
    mine = [name for name, _ in fx.weights(model, ranks="main")]
    first = next(fx.weights(model))[1]
    first.zero_()  # a copy
    kept = next(fx.weights(model, names="0.weight"))[1]
    return some, cast, mine, list(state), bool(kept.any())


@pytest.mark.parametrize("strategy", [fx.DDP(), FSDP], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("n", [1, 2])
def test_weights_by_name_and_rank(clusters, n, strategy):
    for rank, found in enumerate(clusters[n].run(_chosen, strategy)):
        some, cast, mine, names, kept = found
        assert list(some) == ["1.running_mean", "3.weight", "3.bias"]
        assert some["3.weight"] == _net()[3].weight.tolist()
        assert cast == {"cpu"}
        assert names == list(_net().state_dict())
        assert mine == (names if rank == 0 else [])
        assert kept


def _wrong(ctx, names, ranks):
    model, _, _ = _made(ctx, FSDP)
    names = names[ctx.rank] if isinstance(names, tuple) else names
    list(fx.weights(model, names=names, ranks=ranks))


@pytest.mark.parametrize(
    ("names", "ranks", "kind", "words"),
    [
        (
            ["3.wieght"],
            "all",
            fx.PlanError,
            "no tensor matches '3.wieght'. Did you mean 3.weight",
        ),
        (["0.*"], "first", fx.PlanError, "ranks='first'"),
        ((["0.*"], ["1.*"]), "all", fx.CollectiveError, "what to gather"),
    ],
)
def test_what_weights_refuses(pair, names, ranks, kind, words):
    with pytest.raises(kind, match=words.replace("(", r"\(")):
        pair.run(_wrong, names, ranks)


def test_what_is_not_wrapped_has_a_state_dict():
    for call in (fx.weights, lambda net: fx.gathered(net).__enter__()):
        with pytest.raises(fx.PlanError, match=r"module\.state_dict\(\)"):
            call(nn.Linear(2, 1))


def _left_early(ctx, stops, ranks):
    """Leave the loop on some ranks after a tensor; then see that ranks still work together."""
    model, _, _ = _made(ctx, FSDP)
    seen, words = [], ""
    try:
        for name, _ in fx.weights(model, ranks=ranks):
            seen.append(name)
            if ctx.rank in stops:
                break
    except fx.CollectiveError as error:
        words = str(error)
    return seen, words, fx.ops.gather_objects(ctx.rank, ctx)


@pytest.mark.parametrize(
    ("stops", "ranks", "seen"),
    [((0,), "all", 1), ((1,), "all", 1), ((0, 1), "all", 1), ((0,), "main", 0)],
)
def test_a_loop_that_one_rank_leaves_ends_on_all(pair, stops, ranks, seen):
    for rank, (names, words, together) in enumerate(pair.run(_left_early, stops, ranks)):
        assert len(names) == (1 if rank in stops else seen)
        alone = rank not in stops and ranks == "all"
        assert (f"rank {stops[0]} left the loop before '0.bias'" in words) == alone, words
        assert together == [0, 1]


def _left_at_the_end(ctx):
    model, _, _ = _made(ctx, FSDP)
    names = list(model.module.state_dict())
    for name, _ in fx.weights(model):
        if ctx.rank == 0 and name == names[-1]:
            break
    return fx.ops.gather_objects(ctx.rank, ctx)


def test_a_rank_may_leave_the_loop_at_the_last_tensor(pair):
    assert pair.run(_left_at_the_end) == [[0, 1], [0, 1]]


def _anchored(ctx):
    model = fx.wrap(_net(), ctx, fx.Plan(local=fx.DiLoCo(every=2)), optimizer=_adam)
    fx.load_model({name: torch.ones_like(t) for name, t in _net().state_dict().items()}, model)
    return [bool((anchor == 1).all()) for anchor in model.strategy_state.anchor.values()]


def test_an_outer_optimizer_starts_from_what_is_loaded(pair):
    for same in pair.run(_anchored):
        assert same == [True] * 6


def _failed_inside(ctx, fails, ranks):
    model, fns, loader = _made(ctx, FSDP)
    words = None
    try:
        with fx.gathered(model, ranks=ranks) as net:
            assert (net is None) == (ranks == "main" and ctx.rank > 0)
            if ctx.rank in fails:
                raise KeyError("mine")
    except (KeyError, fx.CollectiveError) as error:
        words = f"{type(error).__name__} {error}"
    fx.step(ctx, next(iter(loader)), fns)
    return words


@pytest.mark.parametrize("ranks", ["all", "main"])
@pytest.mark.parametrize("fails", [(0,), (0, 1)])
def test_a_block_that_fails_on_one_rank_fails_on_all(pair, fails, ranks):
    for rank, words in enumerate(pair.run(_failed_inside, fails, ranks)):
        if rank in fails:
            assert words == "KeyError 'mine'"
        else:
            assert "CollectiveError Another rank failed" in words
            assert "rank 0: KeyError: 'mine'" in words


def _spoilt(ctx, strategy):
    """Bits of everything before and after a block that changes what it can."""
    net = _net()
    model, fns, loader = _made(ctx, strategy, net, accumulate=2)
    batches = iter(loader)
    fx.step(ctx, next(batches), fns)  # leaves a window open
    before = _anatomy(model)
    with fx.gathered(model) as lent:
        assert lent is net
        assert all(type(p) is nn.Parameter for p in lent.parameters())
        lent.eval()
        lent.note = "mine"
        lent[0].weight.data.fill_(7.0)
        lent[1].running_mean.fill_(7.0)
        lent[0].register_forward_hook(lambda *_: None)
        lent.append(nn.Linear(1, 1))
        lent(torch.ones(4, 8))[0].sum().backward()
        copy.deepcopy(lent)
    after = _anatomy(model)
    return [what for what in before if not _same(before[what], after[what])]


def _anatomy(model):
    net = model.module
    found = {f"own {name}": list(vars(part)) for name, part in net.named_modules()}
    found |= {f"mode {name}": part.training for name, part in net.named_modules()}
    found |= {f"class {name}": type(part) for name, part in net.named_modules()}
    state = model.strategy.state(model) if type(model.plan.strategy) is fx.DDP else None
    tensors = net.state_dict(keep_vars=True) if state is None else {**state.tensors, **state.own}
    for name, tensor in tensors.items():
        held = getattr(tensor, "_local_tensor", tensor)
        found[f"bits {name}"] = held.detach().clone()
        found[f"object {name}"] = id(tensor) if state is None else 0
    return found


def _same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("strategy", [fx.DDP(), FSDP], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("n", [1, 2])
def test_nothing_of_a_block_is_left(clusters, n, strategy):
    for changed in clusters[n].run(_spoilt, strategy):
        assert changed == []


def _drifted(ctx, plan):
    """Weights and buffers of copies that differ: those of the first one, on every rank."""
    model = fx.wrap(_net(), ctx, plan, optimizer=_adam)
    with torch.no_grad():
        for tensor in model.module.state_dict().values():
            if tensor.is_floating_point() and (plan.local or tensor.ndim == 1):
                tensor.add_(ctx.rank)
    own = {n: t.clone() for n, t in model.module.state_dict().items()}
    with fx.gathered(model) as lent:
        inside = {n: t.clone() for n, t in lent.state_dict().items()}
    return own, dict(fx.weights(model)), inside


@pytest.mark.parametrize("local", [None, fx.LocalSGD(every=8)], ids=["together", "alone"])
def test_what_differs_between_copies_is_that_of_the_first(pair, local):
    (first, *_), *_ = found = pair.run(_drifted, fx.Plan(strategy=fx.DDP(), local=local))
    names = first if local is not None else ["1.running_mean", "1.running_var"]
    for _, seen, inside in found:
        for name in names:
            assert torch.equal(seen[name], first[name]), name
            assert torch.equal(inside[name], first[name]), name


def _most_alive(ctx):
    """Whole tensors that come to life while a loop that keeps none runs."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = fx.wrap(net, ctx, fx.Plan(strategy=FSDP))
    gc.collect()
    before, most = _alive(), 0
    for _ in fx.weights(model):
        most = max(most, len(_alive() - before))
    return most


def _alive():
    """Where whole tensors lie."""
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == 64 * 64]
    return {t.untyped_storage().data_ptr() for t in tensors}


def test_weights_come_one_by_one(pair):
    assert 1 <= max(pair.run(_most_alive)) <= 2


def _stage(ctx):
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        net = Transformer()
        model = fx.wrap(net, placed, fx.Plan(strategy=fx.PP()))
        said = []
        for call in (net, net.embed, net.head):
            try:
                call(torch.zeros(2, 6, dtype=torch.int64))
            except (fx.StepError, RuntimeError) as error:
                said.append(str(error))
        whole = fx.unwrap(model)
        return said, whole(torch.zeros(2, 6, dtype=torch.int64)).shape


@PIPELINES
def test_a_module_in_stages_says_what_to_call(pair):
    for said, shape in pair.run(_stage):
        assert shape == (2, 6, 24)
        assert "PP: model.module was called" in said[0]
        assert "fx.gathered(model)" in said[0]
