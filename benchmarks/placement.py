"""Placements of a model of 173,000 tensors: seconds to measure and to place it.

The model has the shape of a mixture of experts: 60 blocks of 2,886 tensors each, once with blocks
that stay whole and once with every module as a unit of its own.

python -m benchmarks.placement
"""

import importlib.util
import time

import torch
from torch import nn

from benchmarks._common import show, tell
from fxtrain import big

BLOCKS, EXPERTS = 60, 2885


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(2))
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(EXPERTS))


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(_Block() for _ in range(BLOCKS))
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def _timed(run):
    times = []
    for _ in range(3):
        started = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - started)
    return result, min(times)


def _rows(net, no_split, what):
    sizes, measuring = _timed(lambda: big.sizes(net, no_split=no_split))
    half = sizes.bytes // 2
    _, one = _timed(lambda: big.place(sizes, big.budget({"cuda:0": half})))
    four = {f"cuda:{index}": half // 4 for index in range(4)}
    _, several = _timed(lambda: big.place(sizes, big.budget({**four, "cpu": half // 4})))
    return [
        f"{what}: {len(sizes.units):,} units, {len(sizes.tensors):,} tensors",
        *(f"{seconds:.3f}" for seconds in (measuring, one, several)),
    ]


def _accelerate(net):
    from accelerate import infer_auto_device_map

    memory = {"cpu": 4 * 2 * 2 * BLOCKS * EXPERTS // 2, "disk": 1 << 40}
    started = time.perf_counter()
    infer_auto_device_map(net, max_memory=memory, no_split_module_classes=["_Block"])
    return time.perf_counter() - started


def main():
    tell("1 of 3: the model, on the meta device")
    with torch.device("meta"):
        net = _Net()
    tell("2 of 3: fxtrain")
    rows = [_rows(net, None, "blocks whole"), _rows(net, (), "every module")]
    for what, *seconds in rows:
        tell(f"{what}: {' s, '.join(seconds)} s")
    tell("3 of 3: Accelerate, which takes a minute or more")
    if importlib.util.find_spec("accelerate"):
        rows.append(
            ["Accelerate's infer_auto_device_map, blocks whole", "", f"{_accelerate(net):.3f}", ""]
        )
    show(
        "Placing 173,000 tensors, s (least of 3)",
        ["what", "sizes", "place, 1 device", "place, 4 devices and CPU"],
        rows,
    )


if __name__ == "__main__":
    main()
