"""How many bytes a streamed model reads and allocates, against what its placement says."""

import json
import sys
import threading
from collections import Counter

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.backends.offload import streaming
from fxtrain.backends.offload.strategy import OFFLOAD
from fxtrain.testing import Transformer
from tests._slow import slow_after
from tests.offload._memory import peak_bytes
from tests.offload._streamed import COPIES, TOKENS, placement, streamed

FORWARDS = 4
BLOCKS = tuple(f"blocks.{number}" for number in range(4))


@pytest.fixture
def four_blocks(tmp_path):
    fx.export(Transformer(blocks=4), tmp_path)
    return tmp_path


def _ranges(folder):
    """By name, where a tensor is in its file."""
    raw = (folder / "model.safetensors").read_bytes()
    first = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:first])
    header.pop("__metadata__", None)
    return {
        name: range(first + one["data_offsets"][0], first + one["data_offsets"][1])
        for name, one in header.items()
    }


@pytest.mark.parametrize("prefetch", slow_after(2, [0, 3, 1]))
@pytest.mark.parametrize("row", [OFFLOAD, COPIES], ids=["in place", "copied"])
def test_a_forward_reads_streamed_bytes_once_and_no_others(
    ctx, four_blocks, monkeypatch, row, prefetch
):
    """Units that are read for the next forward, while one ends, are read once as well."""
    read, counts = streaming.read, Counter()

    def counted(file, tensor, start, stop):
        counts.update(range(start, stop))
        read(file, tensor, start, stop)

    monkeypatch.setattr(streaming, "read", counted)
    net = Transformer(blocks=4)
    model = streamed(ctx, four_blocks, placement(*BLOCKS[1:], prefetch=prefetch), row, net)
    with torch.no_grad():
        for _ in range(FORWARDS):
            model(TOKENS)
    fx.unwrap(model)
    ranges = _ranges(four_blocks)
    for name, offsets in ranges.items():
        times = {counts[offset] for offset in offsets}
        if not name.startswith(BLOCKS[1:]):
            assert times == {0}, name
        elif row is COPIES:
            assert times <= {FORWARDS, FORWARDS + 1} if prefetch else times == {FORWARDS}, name
        else:  # pages that are in memory need no reading
            assert max(times) <= FORWARDS + 1, name
    assert counts.total() > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts waits for the disk")
def test_units_in_memory_are_not_read_again_while_other_threads_run(ctx, four_blocks, monkeypatch):
    """Waiting for Python's lock is not taken for waiting for the disk."""
    read, reads = streaming.read, []

    def noted(file, tensor, start, stop):
        reads.append((start, stop))
        read(file, tensor, start, stop)

    monkeypatch.setattr(streaming, "read", noted)
    model = streamed(ctx, four_blocks, placement(*BLOCKS), net=Transformer(blocks=4))
    done = threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(done.is_set, True)])
    busy.start()
    try:
        with torch.no_grad():
            model(TOKENS)
            assert reads
            reads.clear()
            for _ in range(3):
                model(TOKENS)
    finally:
        done.set()
        busy.join()
    assert not reads


@pytest.mark.parametrize("prefetch", [0, 2])
def test_host_buffers_of_copied_units_are_those_of_the_placement(
    ctx, four_blocks, monkeypatch, prefetch
):
    sizes, make = [], streaming.pinned_buffer

    def noted(nbytes, kind):
        sizes.append(nbytes)
        return make(nbytes, kind)

    monkeypatch.setattr(streaming, "pinned_buffer", noted)
    measured = fx.big.sizes(four_blocks)
    budget = fx.big.budget({"cuda:0": "1GiB", "cpu": "1GiB"})
    policy = {"": "cuda:0"} | dict.fromkeys(BLOCKS, "disk")
    placed = fx.big.place(measured, budget, policy=policy, prefetch=prefetch)
    largest = max(unit.bytes for unit in placed.streamed)
    assert placed.staging == placed.room == (1 + prefetch) * largest
    names = [unit.name for unit in placed.streamed]
    model = streamed(
        ctx, four_blocks, placement(*names, prefetch=prefetch), COPIES, Transformer(blocks=4)
    )
    with torch.no_grad():
        model(TOKENS)
        model(TOKENS)
    fx.unwrap(model)
    assert len(sizes) == 1 + prefetch
    assert placed.staging <= sum(sizes) <= placed.staging + (1 + prefetch) * 256 * 20


def _layers():
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))


def test_memory_at_its_peak_is_what_is_resident_and_at_most_one_unit(ctx, tmp_path):
    """Filling and two forwards of 16 units, of which 4 are resident."""
    fx.export(_layers(), tmp_path)
    file, unit = tmp_path / "model.safetensors", 512 * 512 * 4
    x, placed = torch.randn(2, 512), placement(*(str(number) for number in range(4, 16)))

    def run():
        model = streamed(ctx, tmp_path, placed, net=fx.big.empty(_layers))
        with torch.no_grad():
            model(x)
            return model, model(x)

    run()  # what is loaded on first use
    assert 4 * unit <= peak_bytes(run, mapped=file.stat().st_size) <= (4 + 1) * unit
