"""Digests of replicas: equal for any layout, different for any changed bit and any swap."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fxtrain.backends.core.replica_digests import digests, weighted_sums

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def _on_device(tensor):
    """What `digests` computes on devices other than the CPU."""
    return tuple(weighted_sums(tensor).tolist())


DIGESTS = {"xxh3": lambda tensor: digests([tensor])[0], "sums": _on_device}


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    size = rows * columns * torch.empty(0, dtype=dtype).element_size()
    few = st.integers(0, 1) if dtype is torch.bool else st.sampled_from([0, 1, 127, 128, 255])
    values = draw(st.lists(few, min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.uint8).view(dtype).view(rows, columns)


@pytest.mark.parametrize("name", DIGESTS)
@given(tensor=tensors())
def test_strides_do_not_matter(name, tensor):
    of = DIGESTS[name]
    across = tensor.t().contiguous().t()
    apart = torch.stack([tensor, tensor], dim=-1)[..., 0]
    assert of(tensor) == of(across) == of(apart)


@pytest.mark.parametrize("name", DIGESTS)
@given(tensor=tensors(), data=st.data())
def test_every_changed_bit_is_found(name, tensor, data):
    of, changed = DIGESTS[name], tensor.clone()
    octets = changed.view(-1).view(torch.uint8)
    bit = 0 if tensor.dtype is torch.bool else data.draw(st.integers(0, 7))
    octets[data.draw(st.integers(0, len(octets) - 1))] ^= 1 << bit
    assert of(tensor) != of(changed)


@pytest.mark.parametrize("name", DIGESTS)
@given(tensor=tensors(), data=st.data())
def test_every_swap_is_found(name, tensor, data):
    of, swapped = DIGESTS[name], tensor.clone()
    size = tensor.element_size()
    elements = swapped.view(-1).view(torch.uint8).view(-1, size)
    first, second = (data.draw(st.integers(0, len(elements) - 1)) for _ in range(2))
    assume(not torch.equal(elements[first], elements[second]))
    elements[[first, second]] = elements[[second, first]]
    assert of(tensor) != of(swapped)


def test_swaps_far_apart_are_found():
    """Positions whose difference is a power of two, of values that differ in their sign."""
    for far in (2**12, 2**16, 2**20):
        tensor = torch.ones(far + 1)
        tensor[0] = -1.0
        swapped = tensor.clone()
        swapped[[0, far]] = swapped[[far, 0]]
        assert _on_device(tensor) != _on_device(swapped)
