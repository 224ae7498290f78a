"""Whole weights while training goes on, and a handle that is closed."""

import copy
import gc

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.backends import whole_weights
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._handles import FSDP, adam, new_handle, sequential
from tests.cluster._models import PIPELINES


def _chosen(ctx, strategy):
    model, _, _ = new_handle(ctx, strategy)
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
        assert some["3.weight"] == sequential()[3].weight.tolist()
        assert cast == {"cpu"}
        assert names == list(sequential().state_dict())
        assert mine == (names if rank == 0 else [])
        assert kept


def _wrong(ctx, names, ranks):
    model, _, _ = new_handle(ctx, FSDP)
    names = names[ctx.rank] if isinstance(names, tuple) else names
    list(fx.weights(model, names=names, ranks=ranks))


@pytest.mark.parametrize(
    ("names", "ranks", "kind", "words"),
    slow_after(
        2,
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
    ),
)
def test_what_weights_refuses(pair, names, ranks, kind, words):
    with pytest.raises(kind, match=words.replace("(", r"\(")):
        pair.run(_wrong, names, ranks)


def test_what_is_not_wrapped_has_a_state_dict():
    for call in (fx.weights, lambda net: fx.gathered(net).__enter__()):
        with raises_code("FX200", "module.state_dict()"):
            call(nn.Linear(2, 1))


def _left_early(ctx, stops, ranks, together):
    """Leave the loop on some ranks after a tensor; then see that ranks still work together."""
    model, _, _ = new_handle(ctx, FSDP)
    seen, words = [], ""
    before, whole_weights._TOGETHER = whole_weights._TOGETHER, together
    try:
        for name, _ in fx.weights(model, ranks=ranks):
            seen.append(name)
            if ctx.rank in stops:
                break
    except fx.CollectiveError as error:
        words = str(error)
    finally:
        whole_weights._TOGETHER = before
    return seen, words, fx.ops.gather_objects(ctx.rank, ctx)


@pytest.mark.parametrize(
    ("stops", "ranks", "seen"),
    [((0,), "all", 1), ((1,), "all", 1), ((0, 1), "all", 1), ((0,), "main", 0)],
)
def test_a_loop_that_one_rank_leaves_ends_on_all(pair, stops, ranks, seen):
    for rank, (names, words, together) in enumerate(pair.run(_left_early, stops, ranks, 0)):
        assert len(names) == (1 if rank in stops else seen)
        alone = rank not in stops and ranks == "all"
        assert (f"rank {stops[0]} left the loop before '0.bias'" in words) == alone, words
        assert together == [0, 1]


@pytest.mark.parametrize("stops", [(0,), (1,), (0, 1)])
def test_small_tensors_are_gathered_together_so_that_a_rank_may_leave_among_them(pair, stops):
    for rank, (names, words, together) in enumerate(pair.run(_left_early, stops, "all", 1 << 20)):
        assert len(names) == (1 if rank in stops else len(sequential().state_dict()))
        assert words == "" and together == [0, 1]


def _left_at_the_end(ctx):
    model, _, _ = new_handle(ctx, FSDP)
    names = list(model.module.state_dict())
    for name, _ in fx.weights(model):
        if ctx.rank == 0 and name == names[-1]:
            break
    return fx.ops.gather_objects(ctx.rank, ctx)


def test_a_rank_may_leave_the_loop_at_the_last_tensor(pair):
    assert pair.run(_left_at_the_end) == [[0, 1], [0, 1]]


def _anchored(ctx):
    model = fx.wrap(sequential(), ctx, fx.Plan(local=fx.DiLoCo(every=2)), optimizer=adam)
    fx.load_model(
        {name: torch.ones_like(t) for name, t in sequential().state_dict().items()}, model
    )
    return [bool((anchor == 1).all()) for anchor in model.status.replica.anchor.values()]


def test_an_outer_optimizer_starts_from_what_is_loaded(pair):
    for same in pair.run(_anchored):
        assert same == [True] * 6


def _failed_inside(ctx, fails, ranks):
    model, fns, loader = new_handle(ctx, FSDP)
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
    net = sequential()
    net[0].notes = net[1].notes = ["theirs"]
    model, fns, loader = new_handle(ctx, strategy, net, accumulate=2)
    batches = iter(loader)
    fx.step(ctx, next(batches), fns)  # leaves a window open
    before = _anatomy(model)
    with fx.gathered(model) as lent:
        assert lent is net
        assert all(type(p) is nn.Parameter for p in lent.parameters())
        lent.eval()
        lent.note = "mine"
        lent[0].notes.append("mine")
        assert lent[1].notes is lent[0].notes
        lent[0].weight.data.fill_(7.0)
        lent[1].running_mean.fill_(7.0)
        lent[0].register_forward_hook(lambda *_: None)
        lent.append(nn.Linear(1, 1))
        lent(torch.ones(4, 8))[0].sum().backward()
        copy.deepcopy(lent)
    assert net[1].notes is net[0].notes
    assert net[0].notes == ["theirs"]
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
    model = fx.wrap(sequential(), ctx, plan, optimizer=adam)
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


def _most_alive(ctx, together):
    """Whole tensors that come to life while a loop that keeps none runs."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    model = fx.wrap(net, ctx, fx.Plan(strategy=FSDP))
    gc.collect()
    before, most = _alive(), 0
    limit, whole_weights._TOGETHER = whole_weights._TOGETHER, together
    try:
        for _ in fx.weights(model):
            most = max(most, len(_alive() - before))
    finally:
        whole_weights._TOGETHER = limit
    return most


def _alive():
    """Where whole tensors lie."""
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == 64 * 64]
    return {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize(("together", "most"), [(0, 2), (3 * 64 * 64 * 4, 4)])
def test_only_what_is_gathered_together_is_alive(pair, together, most):
    assert 1 <= max(pair.run(_most_alive, together)) <= most


def _stage(ctx):
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        net = Transformer()
        model = fx.wrap(net, placed, fx.Plan(strategy=fx.PP()))
        said = []
        for call in (net, net.embed, net.head):
            try:
                call(torch.zeros(2, 6, dtype=torch.int64))
            except (fx.errors.StepError, RuntimeError) as error:
                said.append(str(error))
        whole = fx.unwrap(model)
        return said, whole(torch.zeros(2, 6, dtype=torch.int64)).shape


@PIPELINES
def test_a_module_in_stages_says_what_to_call(pair):
    for said, shape in pair.run(_stage):
        assert shape == (2, 6, 24)
        assert "PP: model.module was called" in said[0]
        assert "fx.gathered(model)" in said[0]
