"""Every strategy, on every world and mesh it takes, against one process on torch alone."""

import pytest
import torch

import fxtrain as fx
from fxtrain.testing import LAWS, Transformer, all_at_once
from fxtrain.testing.training import backward_once, on_mesh, token_rows
from tests._slow import slow_after
from tests.cluster._laws import LAW, LONG, TOGETHER
from tests.cluster._models import PIPELINES, is_block

NAMES = [law.__name__ for law in LAWS]

# Each kind of strategy is held to every law once, DDP and FSDP to each by itself, and the others to
# those that `all_at_once` holds together in its one run. Plans that differ from that one in a
# single thing are held to the laws that this thing could break. At one rank, a plan that changes no
# bit of the loop, clipping included, breaks none of those that compare it with a reference.
ONCE = ("non_finite_skips_everywhere", "resumes_where_it_stopped")
MOST = tuple(name for name in NAMES if name not in ONCE)
ALL = ("all_at_once", *(n for n in NAMES if n not in TOGETHER and n != "one_rank_is_the_loop"))
ALONE_LAWS = tuple(n for n in NAMES if n not in (*TOGETHER, "every_function_is_used"))
UNITS = ("all_at_once", "unwrap_gives_the_module_back")
# Beside those that `all_at_once` holds together.
REST = (
    *ONCE,
    "frozen_and_tied_stay",
    "overflow_skips_everywhere",
    "unwrap_gives_the_module_back",
)
SLOW = pytest.mark.slow


def _is_quick(n, law):
    return n > 1 or law == "one_rank_is_the_loop"


def cases(laws, *, slow=LONG):
    """Number of ranks, name of a plan and name of a law, from names of laws by the first two.

    Those of the first plan are quick, except the laws that `slow` names.
    """
    first = next(name for _, name in laws)
    every = [(*row, law) for row, names in laws.items() for law in names]
    return [
        pytest.param(
            *case,
            marks=[]
            if case[1] == first and _is_quick(case[0], case[2]) and case[2] not in slow
            else SLOW,
        )
        for case in every
    ]


DDP_PLANS = {
    "plain": fx.Plan(),
    "small buckets": fx.Plan(strategy=fx.DDP(bucket_mib=0.001, bucket_view=False)),
}


@pytest.mark.parametrize("law", LAWS, ids=NAMES)
def test_single(clusters, law):
    law(clusters[1], fx.Plan(strategy=fx.Single()))


RESIDENT = fx.state.Placement(units=(fx.state.Unit(name="", device="cpu"),))


@pytest.mark.parametrize(
    ("n", "name", "law"), cases({(1, "resident"): ALONE_LAWS, (2, "resident"): ALL})
)
def test_offload_with_everything_resident(clusters, n, name, law):
    LAW[law](clusters[n], fx.Plan(strategy=fx.Offload(placement=RESIDENT)))


DDP_LAWS = {
    (1, "plain"): ALONE_LAWS,
    (2, "plain"): MOST,
    (2, "small buckets"): ("all_at_once", *REST),
    (4, "plain"): ALL,
    (4, "small buckets"): UNITS,
}


@pytest.mark.parametrize(("n", "name", "law"), cases(DDP_LAWS, slow=()))
def test_ddp(clusters, n, name, law):
    LAW[law](clusters[n], DDP_PLANS[name])


@pytest.mark.parametrize(("n", "name", "law"), cases({(2, "sharded"): ALL}))
def test_ddp_with_a_sharded_optimizer(clusters, n, name, law):
    LAW[law](clusters[n], fx.Plan(strategy=fx.DDP(shard_optimizer=True)))


FSDP_PLANS = {
    "blocks of ModuleLists": (fx.FSDP(), None),
    "whole between forward and backward": (fx.FSDP(mode="grads_and_optimizer"), None),
    "not sharded": (fx.FSDP(mode="none"), None),
    "two copies of half the ranks": (fx.FSDP(shard=2), None),
    "by mesh": (fx.FSDP(), fx.Mesh(replicate=-1, shard=2)),
    "tied modules each a unit": (fx.FSDP(wrap=("Embedding", "Head", "Block")), None),
    "by size": (fx.FSDP(min_params=1500, forward_prefetch=2, backward_prefetch=1), None),
    "by a function": (fx.FSDP(wrap_by=is_block), None),
    "some ignored": (fx.FSDP(ignore=("gain", "blocks.0.norm*"), offload=True), None),
}


FSDP_LAWS = {
    (1, "blocks of ModuleLists"): tuple(name for name in ALONE_LAWS if name not in ONCE),
    (2, "blocks of ModuleLists"): NAMES,
    (2, "whole between forward and backward"): (*UNITS, "synced_each"),
    (2, "not sharded"): ("same_in_micro_batches", "same_by_tokens", *ONCE),
    (2, "by mesh"): ("same_clipped",),
    (2, "tied modules each a unit"): (*UNITS, "frozen_and_tied_stay"),
    (2, "by size"): UNITS,
    (2, "by a function"): ("same_clipped",),
    (2, "some ignored"): ("all_at_once", *REST),
    (4, "blocks of ModuleLists"): ("same_by_tokens", "frozen_and_tied_stay"),
    (4, "two copies of half the ranks"): ("all_at_once", "synced_each", *REST),
    (4, "by mesh"): ("same_clipped",),
}


@pytest.mark.parametrize(("n", "name", "law"), cases(FSDP_LAWS))
def test_fsdp(clusters, n, name, law):
    config, mesh = FSDP_PLANS[name]
    LAW[law](clusters[n], fx.Plan(strategy=config), mesh)


EXTRAS = {
    "recompute": {"recompute": ("Block",)},
    "compile": {"compile": fx.Compile(backend="eager")},
    "recompute and compile blocks": {
        "recompute": ("Block",),
        "compile": fx.Compile(backend="eager", blocks=("Block",)),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("law", UNITS)
@pytest.mark.parametrize("name", EXTRAS)
def test_fsdp_of_recomputed_and_compiled_blocks(pair, name, law):
    LAW[law](pair, fx.Plan(strategy=fx.FSDP(), **EXTRAS[name]))


CUTS = (
    fx.Style(modules="blocks.*.attention.[qkv]", style="colwise"),
    fx.Style(modules="blocks.*.attention.o", style="rowwise"),
    fx.Style(modules="blocks.*.up", style="colwise"),
    fx.Style(modules="blocks.*.down", style="rowwise"),
)
ENDS = (
    fx.Style(modules="embed", style="rowwise"),
    fx.Style(modules="head", style="colwise_gather"),
)

TP_PLANS = {
    "tensor": (fx.TP(styles=CUTS), {}, fx.Mesh(tensor=2)),
    "vocabulary too": (fx.TP(styles=CUTS + ENDS), {}, fx.Mesh(tensor=2)),
    "sequence": (fx.TP(styles=CUTS, sequence=True), {}, fx.Mesh(tensor=2)),
    "four ways": (fx.TP(styles=CUTS + ENDS, sequence=True), {}, fx.Mesh(tensor=4)),
    "and shards": (fx.TP(styles=CUTS + ENDS), {}, fx.Mesh(shard=2, tensor=2)),
    "sequence and shards": (fx.TP(styles=CUTS, sequence=True), {}, fx.Mesh(shard=2, tensor=2)),
    "and copies": (fx.TP(styles=CUTS), {"mode": "none"}, fx.Mesh(tensor=2)),
    "not all in shards": (
        fx.TP(styles=CUTS, sequence=True),
        {"ignore": ("*.up.*", "*.norm_2.*")},
        fx.Mesh(shard=2, tensor=2),
    ),
}

TP_LAWS = {
    (2, "tensor"): tuple(name for name in ALL if name not in ONCE),
    (2, "vocabulary too"): (
        *ONCE,
        "same_clipped",
        "frozen_and_tied_stay",
        "unwrap_gives_the_module_back",
    ),
    (2, "sequence"): ("same_by_tokens", "same_clipped"),
    (4, "four ways"): ("same_clipped", "unwrap_gives_the_module_back"),
    (4, "and shards"): ("same_clipped",),
    (4, "sequence and shards"): ("all_at_once", *REST),
    (4, "and copies"): ("all_at_once",),
    (4, "not all in shards"): ("all_at_once",),
}


@pytest.mark.parametrize(("n", "name", "law"), cases(TP_LAWS))
def test_tensor_parallel(clusters, n, name, law):
    tensor, options, mesh = TP_PLANS[name]
    LAW[law](clusters[n], fx.Plan(strategy=fx.FSDP(tensor=tensor, **options)), mesh)


ROWS = ("position",)
CP_PLANS = {
    "replicas": (2, fx.DDP(), {}, fx.Mesh(context=2)),
    "shards": (2, fx.FSDP(), {"rotate": "alltoall"}, fx.Mesh(context=2)),
    "in order": (2, fx.FSDP(mode="none"), {"balance": False}, fx.Mesh(context=2)),
    "four parts": (4, fx.DDP(), {}, fx.Mesh(context=4)),
    "and data": (4, fx.DDP(), {"balance": False}, fx.Mesh(replicate=2, context=2)),
    "and sharded data": (4, fx.FSDP(), {}, fx.Mesh(shard=2, context=2)),
    "two copies": (4, fx.FSDP(shard=2), {"rotate": "alltoall"}, fx.Mesh(context=2)),
    "and tensor": (4, fx.FSDP(tensor=fx.TP(styles=CUTS)), {}, fx.Mesh(context=2, tensor=2)),
}


CP_LAWS = {
    (2, "shards"): ("all_at_once", "every_function_is_used", *REST),
    (4, "and data"): ALL,
}


@pytest.mark.parametrize(("n", "name", "law"), cases(CP_LAWS))
def test_context_parallel(clusters, n, name, law):
    _, strategy, options, mesh = CP_PLANS[name]
    LAW[law](clusters[n], fx.Plan(strategy=strategy, context=fx.CP(tables=ROWS, **options)), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CP_PLANS if name != "and data"])
def test_context_parallel_clips_and_weighs_tokens(clusters, name):
    n, strategy, options, mesh = CP_PLANS[name]
    plan = fx.Plan(strategy=strategy, context=fx.CP(tables=ROWS, **options), recompute=("Block",))
    all_at_once(clusters[n], plan, mesh)


ALONE = {
    "shared optimizer": fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
    "shards": fx.Plan(strategy=fx.FSDP(mode="grads_and_optimizer", ignore=("gain",))),
    "split": fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=CUTS + ENDS, sequence=True))),
    "sequences": fx.Plan(strategy=fx.FSDP(), context=fx.CP(tables=ROWS)),
    "stages": fx.Plan(
        strategy=fx.PP(schedule="dualpipe_v", stages=fx.FSDP(tensor=fx.TP(styles=CUTS)))
    ),
}


@pytest.mark.parametrize("name", slow_after(2, ALONE))
def test_at_one_rank_every_plan_is_the_loop(clusters, name):
    LAW["one_rank_is_the_loop"](clusters[1], ALONE[name])


class Spare(Transformer):
    """With a layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(4, 4, dtype=torch.float64)
        for parameter in self.spare.parameters():
            torch.nn.init.ones_(parameter)


UNUSED = {
    "replicas": (2, fx.DDP(unused_parameters=True), None),
    "shared optimizer": (2, fx.DDP(shard_optimizer=True, unused_parameters=True), None),
    "shards": (2, fx.FSDP(), None),
    "split": (4, fx.FSDP(tensor=fx.TP(styles=CUTS)), fx.Mesh(shard=2, tensor=2)),
    "stages": (2, fx.PP(), fx.Mesh(pipeline=2)),
    "shards of stages": (4, fx.PP(stages=fx.FSDP()), fx.Mesh(pipeline=2, shard=2)),
}


def _one_update(ctx, strategy, mesh):
    with on_mesh(ctx, mesh) as placed:
        plan = fx.Plan(strategy=strategy, clip_norm=0.5)
        model = fx.wrap(Spare(), placed, plan, optimizer=torch.optim.AdamW)
        backward_once(placed, model)
        norm = model.strategy.apply(model, fx.state.UpdateSpec(clip_norm=0.5)).grad_norm
        data = placed.axis("data").world_size
        return data, float(norm), {n: p.detach() for n, p in fx.unwrap(model).named_parameters()}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([PIPELINES] if isinstance(strategy, fx.PP) else []),
                *([pytest.mark.slow] if n > 2 else []),
            ],
        )
        for name, (n, strategy, _) in UNUSED.items()
    ],
)
def test_a_parameter_without_gradient_counts_for_nothing(clusters, name):
    n, strategy, mesh = UNUSED[name]
    for data, norm, got in clusters[n].run(_one_update, strategy, mesh):
        net = Spare()  # which weight decay would move, had it a gradient of zeros
        tokens, _ = token_rows(4 * data)
        (net(tokens[:, :-1]).sum() / data).backward()
        wanted = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        assert norm == pytest.approx(float(wanted), rel=1e-9)
        torch.optim.AdamW(net.parameters()).step()
        torch.testing.assert_close(got, dict(net.named_parameters()), rtol=1e-6, atol=1e-9)
