"""Orders as functions of (seed, epoch, index)."""

import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fxtrain.data.order import (
    CustomOrder,
    find_order,
    hash_key,
    permutation,
    round_keys,
    uniform,
    uniform_below,
)
from tests._errors import raises_code
from tests._slow import slow_after

BIG = 100_003  # above the length up to which a table is used


def take(sampler, seed=0, epoch=0):
    order = find_order(sampler, seed, epoch)
    return order.take(torch.arange(order.length))


def _chi(counts, expected):
    """Standard deviations by which chi-square lies above what it should be."""
    chi = float(((counts - expected) ** 2 / expected).sum())
    free = counts.numel() - 1
    return (chi - free) / math.sqrt(2 * free)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 255, 4096, (1 << 16), (1 << 16) + 1, BIG, 200_000])
def test_a_permutation_is_a_bijection(n):
    found = permutation(n, round_keys(7, 1))(torch.arange(n))
    assert torch.equal(found.sort().values, torch.arange(n))


@pytest.mark.parametrize("n", [(1 << 32) - 1, (1 << 32) + 1, 10**13, 1 << 61, 1 << 62])
def test_a_permutation_needs_no_memory(n):
    find = permutation(n, round_keys(7, 1))
    places = torch.cat(
        [torch.arange(2000), n // 2 + torch.arange(2000), n - 1 - torch.arange(2000)]
    )
    found = find(places)
    assert int(found.min()) >= 0 and int(found.max()) < n
    assert len(found.unique()) == len(places)
    assert torch.equal(find(places[37:38]), found[37:38])
    assert find(places.view(3, -1)).shape == (3, 2000)


def test_seeds_and_epochs_give_other_permutations():
    for n in (100, BIG):
        orders = [
            permutation(n, round_keys(seed, epoch))(torch.arange(100))
            for seed in range(5)
            for epoch in range(5)
        ]
        same = [(a == b).sum() for i, a in enumerate(orders) for b in orders[:i]]
        assert max(same) < 10


@pytest.mark.slow
def test_every_permutation_of_four_is_as_likely():
    seen = {}
    for seed in range(4800):
        order = tuple(permutation(4, round_keys(seed, 0))(torch.arange(4)).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert abs(_chi(torch.tensor(list(seen.values())), 200)) < 4


@pytest.mark.parametrize("n", slow_after(1, [50, BIG, 10**10]))
def test_a_place_goes_anywhere_with_equal_chance(n):
    counts = torch.zeros(50)
    for seed in range(400):
        found = permutation(n, round_keys(seed, 1))(torch.arange(min(n, 50)))
        counts += torch.bincount(found * 50 // n, minlength=50)[:50]
    # With 50 places of 50, every permutation hits every cell once.
    assert n == 50 or abs(_chi(counts, 400)) < 4
    cells = torch.zeros(50, 50)
    for seed in range(1000):
        found = permutation(n, round_keys(seed, 2))(torch.arange(min(n, 50)))
        cells[torch.arange(50), found * 50 // n] += 1
    assert abs(_chi(cells, 20)) < 5


@pytest.mark.parametrize("n", [BIG, 1 << 20, 10**9])
def test_neighbors_are_not_kept(n):
    """Differences between consecutive entries are as spread as those of random numbers."""
    found = permutation(n, round_keys(3, 3))(torch.arange(100_000))
    gaps = (found[1:] - found[:-1]) % n
    assert abs(_chi(torch.bincount(gaps * 100 // n, minlength=100), 999.99)) < 5
    halves = torch.bincount(found * 10 // n * 10 + found.roll(1) * 10 // n, minlength=100)
    assert abs(_chi(halves, 1000)) < 5


def test_numbers_are_uniform():
    places = torch.arange(100_000)
    keys = round_keys(1, 2)
    assert (
        abs(_chi(torch.bincount(uniform_below(places, 37, keys), minlength=37), 100_000 / 37)) < 5
    )
    drawn = uniform(places, keys)
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    assert abs(_chi(torch.bincount((drawn * 64).long(), minlength=64), 100_000 / 64)) < 5


def test_keys_are_words_apart():
    assert hash_key(1, 23) != hash_key(12, 3) != hash_key(123)
    assert 0 <= hash_key("x") < 1 << 63


def test_a_random_sampler_permutes():
    for n in (10, BIG):
        found = take(RandomSampler(range(n)))
        assert sorted(found) == list(range(n)) and found != list(range(n))
        assert take(RandomSampler(range(n)), epoch=1) != found != take(RandomSampler(range(n)), 1)


def test_a_random_sampler_may_draw_fewer_more_or_again():
    assert len(set(take(RandomSampler(range(10), num_samples=4)))) == 4
    more = take(RandomSampler(range(10), num_samples=25))
    laps = [more[:10], more[10:20], more[20:]]
    assert [len(set(lap)) for lap in laps] == [10, 10, 5]
    assert laps[0] != laps[1]
    assert laps[0] == take(RandomSampler(range(10)))
    again = take(RandomSampler(range(10), replacement=True, num_samples=1000))
    assert len(again) == 1000 and set(again) == set(range(10))
    order = find_order(RandomSampler(range(10), num_samples=25), 0, 0)
    assert order.take(torch.tensor([21, 3, 12])) == [more[21], more[3], more[12]]


def test_a_subset_is_permuted():
    names = ["a", "c", "e", "g"]
    found = take(SubsetRandomSampler(names))
    assert sorted(found) == names
    assert {tuple(take(SubsetRandomSampler(names), epoch=e)) for e in range(20)} != {tuple(found)}


def test_weights_decide_how_often():
    weights = [0.0, 1.0, 3.0, 0.0, 4.0, 0.0]
    found = torch.bincount(
        torch.tensor(take(WeightedRandomSampler(weights, 40_000))), minlength=6
    ).double()
    assert found[[0, 3, 5]].tolist() == [0, 0, 0]
    assert abs(_chi(found[[1, 2, 4]], torch.tensor([5000.0, 15000, 20000]))) < 4
    without = WeightedRandomSampler([1.0, 1, 1, 5], 4, replacement=False)
    assert sorted(take(without)) == [0, 1, 2, 3]
    assert {tuple(take(without, epoch=epoch)) for epoch in range(20)} != {tuple(take(without))}


def test_weights_that_change_count_from_the_next_epoch_on():
    sampler = WeightedRandomSampler([1.0, 0.0], 5)
    assert take(sampler) == [0] * 5
    sampler.weights = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert take(sampler, epoch=1) == [1] * 5


def test_orders_leave_the_generators_of_the_process_alone():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for sampler in (
        SequentialSampler(range(5)),
        RandomSampler(range(5)),
        WeightedRandomSampler([1.0, 2.0], 2, replacement=False),
    ):
        take(sampler)
    list(CustomOrder(_Mixed(20), 0, 0))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()


class _Mixed(Sampler):
    """Draws from three global generators."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for _ in range(self.n):
            yield (random.random(), float(torch.rand(())), float(np.random.rand()))


class _Own(_Mixed):
    """Draws from a generator of its own, and knows its epoch."""

    def __init__(self, n):
        super().__init__(n)
        self.generator, self.epoch = torch.Generator(), None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for _ in range(self.n):
            yield self.epoch, int(torch.randint(1 << 40, (), generator=self.generator))


@pytest.mark.parametrize("kind", [_Mixed, _Own])
def test_a_custom_sampler_is_a_function_of_seed_and_epoch(kind):
    first = list(CustomOrder(kind(1500), 3, 1))
    torch.rand(5)
    random.random()
    assert list(CustomOrder(kind(1500), 3, 1)) == first
    other_epoch, other_seed = CustomOrder(kind(1500), 3, 2), CustomOrder(kind(1500), 4, 1)
    assert next(iter(other_epoch)) != first[0] != next(iter(other_seed))
    shared = kind(1500)
    assert list(CustomOrder(shared, 3, 1)) == list(CustomOrder(shared, 3, 1)) == first
    assert len(set(first)) == 1500


def test_drawing_between_batches_does_not_reach_a_custom_sampler():
    found = []
    for unit in CustomOrder(_Mixed(1500), 3, 1):
        torch.rand(1)
        random.random()
        found.append(unit)
    assert found == list(CustomOrder(_Mixed(1500), 3, 1))


def test_a_custom_sampler_shuffles_if_it_draws_or_is_told_the_epoch():
    for sampler, shuffled in (([3, 1, 2], False), (_Mixed(3), True), (_Own(3), True)):
        assert CustomOrder(sampler, 0, 0).shuffled is shuffled


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, math.nan], [1.0, math.inf], [2.0, -1.0]])
def test_weights_that_torch_refuses_are_errors(weights):
    sampler = WeightedRandomSampler(weights, 4)
    with pytest.raises(RuntimeError):
        list(sampler)
    with raises_code("FX400", "WeightedRandomSampler"):
        take(sampler)
