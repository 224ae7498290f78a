"""The time of a step by plain formulas, against the same arithmetic by hand."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.backends import strategies
from fxtrain.choosing import step_cost
from fxtrain.choosing.costs import collective_s
from fxtrain.state import DEVICES, Device, DryRun, Operator, Traffic

# 1 TFLOP/s, 1 GB/s of memory, links of 100 MB/s in a node and 10 MB/s between nodes.
DEVICE = Device(
    name="made up",
    memory=10**9,
    flops={"fp32": 1e12, "bf16": 2e12},
    memory_bandwidth=1e9,
    launch_s=0.0,
    link_bandwidth=1e8,
    link_latency_s=1e-3,
    node_bandwidth=1e7,
    node_latency_s=1e-2,
    ranks_per_node=4,
)
ZERO = attrs.evolve(DEVICE, link_latency_s=0.0, node_latency_s=0.0)
SHARDED = fx.Plan(strategy=fx.FSDP())


def _operator(*, flops=0, size=0, phase="forward", count=1, dtype="fp32"):
    return Operator(name="mm", phase=phase, dtype=dtype, flops=flops, bytes=size, count=count)


def _traffic(kind, size, *, ranks=4, axis="replicate", count=1):
    return Traffic(kind=kind, axis=axis, ranks=ranks, count=count, bytes=size)


def _run(*operators, step=(), mesh=None, world=4, **more):
    mesh = mesh or fx.Mesh(replicate=world)
    return DryRun(name="f", world=world, mesh=mesh, operators=operators, step=step, **more)


def test_an_operator_takes_the_longer_of_flops_and_bytes():
    run = _run(_operator(flops=10**12, size=1, count=3), _operator(flops=1, size=2 * 10**9))
    cost = step_cost(run, fx.Plan(), DEVICE)
    assert cost.compute_s == 3 and cost.memory_s == 2 and cost.seconds == 5
    assert cost.limit == "compute"


def test_a_dtype_has_its_rate_and_an_unknown_one_the_lowest():
    for dtype, seconds in (("fp32", 1), ("bf16", 0.5), ("float64", 1)):
        run = _run(_operator(flops=10**12, dtype=dtype))
        assert step_cost(run, fx.Plan(), DEVICE).seconds == seconds


def test_attention_and_convolutions_have_rates_of_their_own():
    device = attrs.evolve(
        DEVICE, attention_flops={"fp32": 5e11, "bf16": 1e12}, convolution_flops={"fp32": 2.5e11}
    )
    names = {"mm": (1, 0.5), "_flash_attention": (2, 1), "convolution_backward": (4, 4)}
    for name, times in names.items():
        for dtype, seconds in zip(("fp32", "bf16"), times, strict=True):
            run = _run(attrs.evolve(_operator(flops=10**12, dtype=dtype), name=name))
            assert step_cost(run, fx.Plan(), device).seconds == seconds
            assert step_cost(run, fx.Plan(), DEVICE).seconds == names["mm"][dtype == "bf16"]


def test_kinds_of_collectives_have_shares_of_the_bandwidth():
    device = attrs.evolve(ZERO, collective_efficiency={"all_gather": 0.5, "all_to_all": 0.25})
    for kind, seconds in (("all_reduce", 2 * 3 / 4), ("all_gather", 6), ("all_to_all", 3)):
        got = collective_s(_traffic(kind, 10**8), _run(), device)
        assert got == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("plan", "axis", "hooks"),
    [
        (fx.Plan(), "replicate", 0),  # those of DDP have none
        (SHARDED, "replicate", 9),
        (fx.Plan(strategy=fx.FSDP(mode="none", tensor=fx.TP())), "tensor", 9),
    ],
)
def test_collectives_that_python_starts_have_hooks(plan, axis, hooks):
    mesh = fx.Mesh(replicate=1, tensor=4) if axis == "tensor" else fx.Mesh(replicate=4)
    step = [_traffic(kind, 0, axis=axis, count=3) for kind in ("all_gather", "reduce_scatter")]
    step += [_traffic(kind, 0, axis=axis) for kind in ("all_reduce", "broadcast", "send", "recv")]
    run = _run(step=tuple(step), mesh=mesh)
    on_cpu = attrs.evolve(ZERO, type="cpu", hook_s=1.0)
    assert step_cost(run, plan, on_cpu).launch_s == hooks
    busy = [_operator(flops=10**12 * hooks, phase=phase) for phase in ("forward", "backward")]
    on_gpu = attrs.evolve(on_cpu, type="gpu")
    assert step_cost(_run(*busy, step=tuple(step), mesh=mesh), plan, on_gpu).launch_s == 0


def test_launches_hide_behind_operators_of_a_gpu_and_add_to_those_of_a_cpu():
    run = _run(_operator(flops=10**12, count=2), _operator(phase="update", count=8))
    slow = attrs.evolve(DEVICE, launch_s=0.5)
    assert step_cost(run, fx.Plan(), slow).launch_s == 0
    slower = attrs.evolve(DEVICE, launch_s=1.5)
    assert step_cost(run, fx.Plan(), slower).launch_s == 1  # an update is one launch of many
    on_cpu = attrs.evolve(slow, type="cpu")
    assert step_cost(run, fx.Plan(), on_cpu).launch_s == 10 * 0.5


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_reduce", 2 * 3 / 4),
        ("all_gather", 3),  # of this rank's part
        ("reduce_scatter", 3 / 4),
        ("broadcast", 1),
        ("all_to_all", 3 / 4),
        ("send", 1),
        ("recv", 0),
        ("barrier", 0),
    ],
)
def test_bytes_of_a_collective_in_a_node(kind, seconds):
    got = collective_s(_traffic(kind, 10**8), _run(), ZERO)
    assert got == pytest.approx(seconds)


def test_latencies_of_a_collective_in_a_node():
    run = _run()
    for kind, hops in (("all_reduce", 4), ("all_gather", 3), ("broadcast", 2), ("send", 1)):
        assert collective_s(_traffic(kind, 0), run, DEVICE) == pytest.approx(hops * 1e-3)


def test_a_collective_of_one_rank_takes_no_time():
    assert collective_s(_traffic("all_reduce", 10**8, ranks=1), _run(), DEVICE) == 0


def test_an_axis_within_nodes_is_faster_than_one_between_them():
    mesh = fx.Mesh(replicate=2, shard=4)  # nodes of four ranks
    run = _run(mesh=mesh, world=8)
    inside = _traffic("all_reduce", 10**8, axis="shard")
    between = _traffic("all_reduce", 10**8, axis="replicate", ranks=2)
    assert collective_s(inside, run, ZERO) == pytest.approx(1.5)  # 1.5e8 bytes of 1e8/s
    assert collective_s(between, run, ZERO) == pytest.approx(10)  # 1e8 of 1e7/s
    # Over all ranks, four on each node have a link to the other node each.
    every = _traffic("all_reduce", 10**8, axis="world", ranks=8)
    assert collective_s(every, run, ZERO) == pytest.approx(2 * 7 / 8 / 0.4)


def test_buckets_hide_behind_backward_of_the_last_micro_batch():
    row = _traffic("all_reduce", 4 * 10**8, count=4)  # six seconds
    parts = [_operator(flops=4 * 10**12, phase="backward"), _operator(flops=10**12)]
    run = _run(*parts, step=(row,))
    assert step_cost(run, fx.Plan(), ZERO).exposed_links_s == pytest.approx(1.5 + 0.5)
    twice = fx.Plan(accumulate=2)  # of which each has half of these operators
    assert step_cost(run, twice, ZERO).exposed_links_s == pytest.approx(1.5 + 2.5)
    each = fx.Plan(accumulate=2, sync_each=True)
    assert step_cost(run, each, ZERO).exposed_links_s == pytest.approx(1.5 + 0.5)
    never = attrs.evolve(ZERO, overlap=0.0)
    assert step_cost(run, fx.Plan(), never).exposed_links_s == pytest.approx(6)


def test_gathers_hide_behind_blocks_but_not_the_first():
    rows = (_traffic("all_gather", 10**8, count=6), _traffic("reduce_scatter", 4 * 10**8, count=3))
    parts = [_operator(flops=10**13), _operator(flops=10**13, phase="backward")]
    cost = step_cost(_run(*parts, step=rows), SHARDED, ZERO)
    assert cost.exposed_links_s == pytest.approx(1)  # a reduce-scatter is the longest


def test_traffic_of_tensor_parallelism_is_exposed():
    mesh = fx.Mesh(replicate=1, tensor=4)
    row = _traffic("all_reduce", 10**8, axis="tensor")
    run = _run(_operator(flops=10**14, phase="backward"), step=(row,), mesh=mesh)
    plan = fx.Plan(strategy=fx.FSDP(mode="none", tensor=fx.TP()))
    assert step_cost(run, plan, ZERO).exposed_links_s == pytest.approx(1.5)


def test_offloaded_states_travel_and_are_updated_by_the_host():
    memory = fx.state.Memory(parameters=10**9)
    run = _run(_operator(size=10**9, phase="update"), memory=memory)
    device = attrs.evolve(DEVICE, host_bandwidth=1e8)
    offloaded = fx.Plan(strategy=fx.FSDP(offload=True))
    cost = step_cost(run, offloaded, device)
    assert cost.exposed_links_s == pytest.approx(30) and cost.memory_s == pytest.approx(10)
    assert step_cost(run, SHARDED, device).seconds == pytest.approx(1)
    stages = fx.Plan(strategy=fx.PP(stages=fx.FSDP(offload=True)))
    assert step_cost(run, stages, device) == cost


@pytest.mark.parametrize(
    ("schedule", "per_rank", "share"),
    [
        ("gpipe", None, 3 / 8),
        ("1f1b", None, 3 / 8),
        ("interleaved_1f1b", 3, 1 / 8),
        ("interleaved_zero_bubble", 2, 1 / 16),
        ("zbv_zero_bubble", None, 0),
        ("dualpipe_v", None, 1 / 8),
    ],
)
def test_bubbles_by_schedule(schedule, per_rank, share):
    plan = fx.Plan(strategy=fx.PP(schedule=schedule, microbatches=8, stages_per_rank=per_rank))
    bubble = strategies()[fx.PP].bubble
    assert bubble(plan, fx.Mesh(pipeline=4)) == pytest.approx(share)
    assert bubble(plan, fx.Mesh(pipeline=1)) == 0


def test_a_bubble_is_a_share_of_forward_and_backward():
    mesh = fx.Mesh(replicate=1, pipeline=4)
    phases = ("forward", "backward", "update")
    run = _run(*(_operator(flops=10**12, phase=phase) for phase in phases), mesh=mesh)
    cost = step_cost(run, fx.Plan(strategy=fx.PP(microbatches=6)), ZERO)
    assert cost.bubble_s == pytest.approx(2 * 3 / 6)
    assert cost.seconds == pytest.approx(4)


def test_a_bubble_does_not_grow_with_the_reduction_of_gradients():
    mesh = fx.Mesh(replicate=4, pipeline=2)
    row = _traffic("all_reduce", 10**8)
    run = _run(_operator(flops=10**12), step=(row,), mesh=mesh, world=8)
    cost = step_cost(run, fx.Plan(strategy=fx.PP(microbatches=2)), ZERO)
    assert cost.bubble_s == pytest.approx(1 / 2)
    assert cost.exposed_links_s == pytest.approx(2 * 3 / 4 * 1e8 / ZERO.link_bandwidth)


@given(
    axis=st.sampled_from(["replicate", "data", "world", "tensor", "2 ranks"]),
    kind=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]),
    field=st.sampled_from(
        ["link_bandwidth", "node_bandwidth", "memory_bandwidth", "link_latency_s", "launch_s",
         "node_latency_s", "overlap"]
    ),
    factor=st.floats(1, 10),
    plan=st.sampled_from([fx.Plan(), SHARDED, fx.Plan(strategy=fx.PP())]),
)  # fmt: skip
def test_a_better_device_is_never_slower(axis, kind, field, factor, plan):
    mesh = fx.Mesh(replicate=2, shard=2, tensor=2, pipeline=2)
    row = Traffic(kind=kind, axis=axis, ranks=4, count=3, bytes=3 * 10**8)
    run = _run(
        _operator(flops=10**12, size=10**9),
        _operator(size=10**9, phase="backward"),
        step=(row,),
        mesh=mesh,
        world=16,
    )
    device = attrs.evolve(DEVICE, overlap=0.5, launch_s=1.0)
    value = getattr(device, field)
    better = value / factor if field.endswith("_s") else value * factor
    better = min(1.0, better) if field == "overlap" else better
    before, after = (
        step_cost(run, plan, each).seconds
        for each in (device, attrs.evolve(device, **{field: better}))
    )
    assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("name", DEVICES)
def test_every_published_device_estimates_a_step(name):
    run = _run(_operator(flops=10**15, size=10**9, dtype="fp16"))
    cost = step_cost(run, fx.Plan(), DEVICES[name])
    assert cost.limit == "compute" and 0.1 < cost.seconds < 30
