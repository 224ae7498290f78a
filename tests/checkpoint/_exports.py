"""Models to export and what tests look at in the files."""

import errno
import json
import os
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from fxtrain.models import load_model
from fxtrain.models.folder import INDEX, SINGLE

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def as_the_ecosystem_reads(folder):
    """Tensors by name, found as transformers finds them."""
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return safetensors.torch.load_file(folder / SINGLE)
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {name: safetensors.torch.load_file(folder / name) for name in set(places.values())}
    return {name: files[file][name] for name, file in places.items()}


def loaded(folder, like):
    """What load_model makes of a folder, in fresh tensors."""
    module = Holder({name: torch.zeros_like(tensor) for name, tensor in like.items()})
    load_model(folder, module)
    return module.state_dict()


class Holder(nn.Module):
    """A module with these tensors."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Tied(nn.Module):
    def __init__(self, **where):
        super().__init__()
        self.embed = nn.Embedding(6, 4, **where)
        self.body = nn.Linear(4, 4, **where)
        self.head = nn.Linear(4, 6, bias=False, **where)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].shape == other[name].shape, name
        bits = [
            t.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
            for t in (one[name], other[name])
        ]
        assert bits[0].numel() == 0 or torch.equal(*(t.view(torch.uint8) for t in bits)), name


def some_state(seed=0, count=5):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(4, 4, generator=generator) for i in range(count)}


def full_disk(name_part, after):
    """An `open` whose files take so many bytes and then fail as a full disk does."""
    real = Path.open

    def opened(self, mode="r", *args, **kwargs):
        file = real(self, mode, *args, **kwargs)
        if "x" not in mode or name_part not in self.name:
            return file
        taken = [0]
        write = file.write

        def limited(data):
            taken[0] += len(data)
            if taken[0] > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(data)

        return _Limited(file, limited)

    return opened


class _Limited:
    def __init__(self, file, write):
        self._file = file
        self.write = write

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)
