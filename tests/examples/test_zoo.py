"""Every example ends with the same values on one rank and on several.

`make examples` starts each as a script, and `make test-recipes` calls `main` of those that need
libraries of their own on the ranks of a pool.
"""

import json

import pytest

from tests.examples._cases import RECIPES, ZOO, agree, on_pools, params
from tests.launched._run import FXTRAIN, run_fork

pytestmark = pytest.mark.timeout(600)


def _told(example, world):
    """What a script prints last on so many ranks."""
    launch = (*FXTRAIN, "launch", "--ranks", str(world))
    ended = run_fork(*launch, example.script, *example.options, timeout_s=500.0)
    assert ended.code == 0, ended.err
    return json.loads(ended.out.strip().splitlines()[-1])


@pytest.mark.examples
@pytest.mark.parametrize("example", params(ZOO))
def test_a_script_ends_with_the_same_values_on_any_number_of_ranks(example, record_property):
    results = []
    for world in example.worlds:
        told = _told(example, world)
        record_property("example", f"{example.path} {json.dumps(told)}")
        assert told.pop("ranks") == world and example.holds(told), told
        results.append(told)
    for other in results[1:]:
        agree(example, results[0], other)


@pytest.mark.recipes
@pytest.mark.parametrize("example", params(RECIPES))
def test_recipes_give_the_same_on_any_number_of_ranks(clusters, example):
    on_pools(clusters, example)
