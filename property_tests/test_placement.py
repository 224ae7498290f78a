"""Laws of placements over random models: cover, budgets, ties, more memory, files."""

import itertools

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain import big
from fxtrain.state import Unit
from fxtrain.state.placement import unit_of

POLICIES = st.sampled_from(["auto", "balanced", "balanced_low_0", "sequential"])


@st.composite
def models(draw):
    """The sizes of a model of a few units, some of which share tensors."""
    tensors, units, firsts = {}, [], []
    buffers, tied = set(), {}
    for number in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(["a", "b.c", "layers", "x.y.z"])) + f".{number}"
        inside, reads = [], 0
        for key in range(draw(st.integers(1, 3))):
            tensor = f"{name}.w{key}" if draw(st.booleans()) or key else f"{name}.sub.w"
            size = draw(st.integers(0, 40))
            if draw(st.integers(0, 5)) == 0:
                buffers.add(tensor)
            elif firsts and draw(st.integers(0, 4)) == 0:
                first = draw(st.sampled_from(firsts))
                tied.setdefault(first, [first]).append(tensor)
                reads, size = reads + tensors[first], 0
            else:
                firsts.append(tensor)
                reads += size
            tensors[tensor] = size
            inside.append(tensor)
        held = sum(tensors[one] for one in inside if one in buffers)
        total = sum(tensors[one] for one in inside)
        units.append(Unit(name=name, kind="Block", bytes=total, buffers=held, reads=reads))
    return big.Sizes(
        source="a drawn model",
        units=tuple(units),
        tensors=tensors,
        buffers=frozenset(buffers),
        tied=tuple(map(tuple, tied.values())),
    )


@st.composite
def budgets(draw):
    rooms = {f"cuda:{index}": draw(st.integers(1, 250)) for index in range(draw(st.integers(0, 3)))}
    if not rooms or draw(st.booleans()):
        rooms["cpu"] = draw(st.integers(1, 250))
    if draw(st.integers(0, 3)) == 0:
        rooms["disk"] = draw(st.integers(0, 300))
    return rooms


options = st.fixed_dictionaries(
    {
        "policy": POLICIES,
        "prefetch": st.sampled_from([None, 0, 1, 2]),
        "offload_buffers": st.booleans(),
        "activations": st.integers(0, 20),
    }
)


def placed(sizes, rooms, asked):
    try:
        return big.place(sizes, big.budget(rooms), **asked)
    except fx.PlanError:
        return None


@given(sizes=models(), rooms=budgets(), asked=options)
def test_every_tensor_is_placed_once_within_the_budget_and_ties_together(sizes, rooms, asked):
    placement = placed(sizes, rooms, asked)
    if placement is None:
        return
    assert [unit.name for unit in placement.units] == [unit.name for unit in sizes.units]
    units = {unit.name: unit for unit in placement.units}
    held = dict.fromkeys(units, 0)
    for tensor, size in sizes.tensors.items():
        held[unit_of(units, tensor).name] += size  # raises where there is none
    assert held == {unit.name: unit.bytes for unit in placement.units}
    for device in placement.devices:
        assert device in rooms or device == "disk"
        assert placement.bytes_on(device) <= rooms.get(device, float("inf"))
    for group in sizes.tied:
        assert len({unit_of(units, tensor).device for tensor in group}) == 1
    reads = {unit.name: unit.reads for unit in sizes.units}
    for unit in placement.streamed:
        assert (1 + placement.prefetch) * reads[unit.name] <= placement.room
    assert asked["prefetch"] in (None, placement.prefetch)


@given(sizes=models(), rooms=budgets(), asked=options, data=st.data())
def test_more_memory_is_never_slower(sizes, rooms, asked, data):
    more = {device: size + data.draw(st.integers(0, 60)) for device, size in rooms.items()}
    before = placed(sizes, rooms, asked)
    after = placed(sizes, more, asked)
    if before is not None:
        assert after is not None
        least, now = (
            big.estimate(one).least_s * (1 if one.prefetch else 2) for one in (before, after)
        )
        assert now <= least * (1 + 1e-9)


@given(
    sizes=models(), asked=options, count=st.integers(1, 3), kind=st.sampled_from(["cuda", "xpu"])
)
def test_with_enough_memory_everything_is_on_devices(sizes, asked, count, kind):
    enough = max(1, sizes.bytes + asked["activations"])
    one = big.place(sizes, big.budget({f"{kind}:0": enough, "cpu": 10}), **asked)
    assert {unit.device for unit in one.units} == {f"{kind}:0"}
    assert one.room == 0 and one.streamed == () and big.estimate(one).least_s == 0
    several = {f"{kind}:{index}": enough for index in range(count)}
    spread = big.place(sizes, big.budget(several), **asked)
    assert {unit.device for unit in spread.units} <= set(several) and spread.streamed == ()


@given(sizes=models(), rooms=budgets(), asked=options)
def test_a_refusal_tells_a_budget_that_suffices(sizes, rooms, asked):
    """The least memory of a single device; other tiers are unlimited."""
    only = {next(iter(sorted(rooms))): 1}
    main = next(iter(only))
    if main == "disk" or placed(sizes, only, asked) is not None:
        return
    with pytest.raises(fx.PlanError) as caught:
        big.place(sizes, big.budget(only), **asked)
    least = str(caught.value).partition("Allow at least ")[2].partition(" B on")[0]
    needed = int(least)
    assert placed(sizes, {main: needed}, asked) is not None
    assert placed(sizes, {main: needed - 1}, asked) is None


@given(
    sizes=models(), rooms=budgets(), asked=options, form=st.sampled_from(["json", "toml", "yaml"])
)
def test_a_placement_survives_text(sizes, rooms, asked, form):
    placement = placed(sizes, rooms, asked)
    if placement is not None:
        again = fx.state.loads(fx.state.dumps(placement, form), fx.state.Placement, form)
        assert again == placement and hash(again) == hash(placement)
        assert fx.fingerprint(again) == fx.fingerprint(placement)
        assert fx.diff(again, placement) == ()


@given(sizes=models(), data=st.data(), buffers=st.booleans())
def test_a_mapping_places_by_the_longest_name(sizes, data, buffers):
    """Names of modules, of units, and of tensors inside of units."""
    names = {""}
    for tensor in sizes.tensors:
        parts = tensor.split(".")
        names |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    chosen = data.draw(st.lists(st.sampled_from(sorted(names - {""})), unique=True, max_size=4))
    devices = st.sampled_from(["cuda:0", "cuda:1", "cpu", "disk"])
    policy = {name: data.draw(devices) for name in ["", *chosen]}
    wanted = {name: Unit(name=name, device=device) for name, device in policy.items()}
    try:
        placement = big.place(sizes, policy=policy, offload_buffers=buffers)
    except fx.PlanError as error:
        assert "tied" in str(error)
        return
    units = {unit.name: unit for unit in placement.units}
    for tensor in sizes.tensors:
        assert unit_of(units, tensor).device == unit_of(wanted, tensor).device
    assert sum(unit.bytes for unit in placement.units) == sizes.bytes


@given(sizes=models(), count=st.integers(2, 3), low=st.booleans())
def test_balanced_is_the_most_even_split_that_keeps_the_order(sizes, count, low):
    """Compared with every split; of low_0, the first device holds nothing if it need not."""
    sizes = attrs.evolve(sizes, tied=())
    rooms = {f"cuda:{index}": 10_000 for index in range(count)}
    policy = "balanced_low_0" if low else "balanced"
    found = big.place(sizes, big.budget(rooms), policy=policy)
    most = max(sum(u.bytes for u in found.units if u.device == device) for device in rooms)
    numbers = [unit.bytes for unit in sizes.units]
    spread = count - low
    splits = itertools.combinations_with_replacement(range(len(numbers) + 1), spread - 1)
    assert most == min(
        max(sum(numbers[a:b]) for a, b in itertools.pairwise((0, *cuts, len(numbers))))
        for cuts in splits
    )
    order = [unit.device for unit in found.units]
    assert order == sorted(order)
    assert not low or sum(u.bytes for u in found.units if u.device == "cuda:0") == 0
