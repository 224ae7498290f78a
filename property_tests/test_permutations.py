"""Permutations: one-to-one, and found from any place alone."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from fxtrain.data.order import find_order, permutation, round_keys


@given(n=st.integers(1, 3000), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 5))
def test_a_permutation_is_a_bijection(n, seed, epoch):
    found = permutation(n, round_keys(seed, epoch))(torch.arange(n))
    assert torch.equal(found.sort().values, torch.arange(n))


@given(n=st.integers(1, 1 << 62), data=st.data())
def test_a_permutation_is_found_from_the_place_alone(n, data):
    at = data.draw(st.integers(0, max(0, n - 64)))
    find = permutation(n, round_keys(1, 2))
    block = find(torch.arange(at, min(n, at + 64)))
    assert len(block.unique()) == len(block)
    assert int(block.min()) >= 0 and int(block.max()) < n
    assert int(find(torch.tensor([at]))) == int(block[0])


@given(n=st.integers(1, 50), count=st.integers(1, 200), replacement=st.booleans(), data=st.data())
def test_any_part_of_an_order_is_that_of_the_whole(n, count, replacement, data):
    sampler = RandomSampler(range(n), replacement=replacement, num_samples=count)
    order = find_order(sampler, 3, 1)
    whole = order.take(torch.arange(count))
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=1))
    assert order.take(torch.tensor(places)) == [whole[place] for place in places]
    if not replacement:
        for lap in range(0, count, n):
            assert len(set(whole[lap : lap + n])) == len(whole[lap : lap + n])
