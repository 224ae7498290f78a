"""The log of memory and the text forms of a dry run, for any history."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.profiling import plot, read_bytes
from fxtrain.profiling.watching import MemoryLog
from fxtrain.state import Memory, Problem, Traffic
from fxtrain.state.dry_runs import PARTS
from fxtrain.state.mesh import AXES, read_mesh

sizes = st.integers(1, 2000)
steps = st.lists(st.one_of(st.tuples(st.just("make"), sizes), st.tuples(st.just("free"), sizes)))


@given(steps=steps, parts=st.lists(st.sampled_from(PARTS)))
def test_the_log_holds_what_is_alive(steps, parts):
    log, alive, most = MemoryLog(), [], 0
    for what, size in steps:
        if what == "make":
            alive.append(torch.empty(size, dtype=torch.uint8))
            log.see(alive[-1])
            log.see(alive[-1][:1])  # a view holds nothing of its own
        elif alive:
            del alive[size % len(alive)]
        most = max(most, sum(tensor.nbytes for tensor in alive))
    for part, tensor in zip(parts, alive, strict=False):
        log.hold(part, [tensor])
    end = len(log.changes)
    assert log.peak(0, end) == most
    assert log.peak(end, end) == sum(tensor.nbytes for tensor in alive)
    held = {part: 0 for part in PARTS}
    for place, tensor in enumerate(alive):
        held[parts[place] if place < len(parts) else "other"] += tensor.nbytes
    assert log.most(end, end) == Memory(**held)
    for moment in log.moments(0, end, most=7):
        assert moment.total <= most
    assert len(log.moments(0, end, most=7)) <= 7


@given(
    first=st.integers(1, 1000),
    changes=st.lists(st.integers(0, 1000), max_size=5),
)
def test_a_resized_storage_counts_with_its_size(first, changes):
    log, tensor = MemoryLog(), torch.empty(first, dtype=torch.uint8)
    log.see(tensor)
    for size in changes:
        tensor.untyped_storage().resize_(size)
        log.resized(tensor.untyped_storage())
    end = len(log.changes)
    assert log.peak(0, end) == max([first, *changes])
    assert log.peak(end, end) == [first, *changes][-1]


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=9)
memories = st.builds(Memory, **dict.fromkeys(PARTS, st.integers(0, 10**15)))
rows = st.builds(
    Traffic,
    kind=st.sampled_from(["all_reduce", "all_gather"]),
    axis=words,
    ranks=sizes,
    count=sizes,
    bytes=sizes,
)
problems = st.builds(
    Problem, kind=st.sampled_from(["memory", "value"]), text=words, where=words, fatal=st.booleans()
)
runs = st.builds(
    fx.state.DryRun,
    name=words,
    world=sizes,
    plan=st.none() | st.builds(fx.Plan, accumulate=sizes),
    memory=memories,
    peak=st.integers(0, 10**15),
    device_memory=st.none() | st.integers(1, 10**15),
    setup=st.lists(rows, max_size=3).map(tuple),
    step=st.lists(rows, max_size=3).map(tuple),
    timeline=st.lists(memories, max_size=4).map(tuple),
    problems=st.lists(problems, max_size=3).map(tuple),
)


@settings(max_examples=15)  # a picture takes a while
@given(run=runs)
def test_a_dry_run_survives_its_text(run):
    assert fx.state.loads(fx.state.dumps(run), fx.state.DryRun) == run
    assert run.fits == all(not problem.fatal for problem in run.problems)
    assert len(plot(run).axes) == 1


@given(sizes=st.dictionaries(st.sampled_from(AXES), st.integers(-1, 64)).filter(bool))
def test_a_mesh_survives_its_text(sizes):
    text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    assert read_mesh(text) == fx.Mesh(**sizes)


@given(count=st.integers(1, 10**6), unit=st.sampled_from(["", "B", "k", "MB", "GiB", " tib"]))
def test_sizes_scale_with_their_unit(count, unit):
    one = read_bytes(f"1{unit}")
    assert one is not None and read_bytes(f"{count}{unit}") == count * one
