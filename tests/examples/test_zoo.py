"""Every example ends with the same values on one rank and on several.

`make test` calls `main` of most on the ranks of a pool, `make examples` starts each as a script,
and `make test-recipes` runs those that need libraries of their own.
"""

import json

import pytest

from tests.examples._cases import RECIPES, ZOO, on_pools, params
from tests.launched._run import FXTRAIN, run_fork

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("example", params(tuple(one for one in ZOO if one.often)))
def test_values_are_the_same_on_any_number_of_ranks(clusters, example):
    on_pools(clusters, example)


@pytest.mark.recipes
@pytest.mark.parametrize("example", params(RECIPES))
def test_recipes_give_the_same_on_any_number_of_ranks(clusters, example):
    on_pools(clusters, example, patient=True)


SCRIPTS = [
    pytest.param(one.values[0], world, id=f"{one.id}-{world}", marks=one.marks)
    for one in params(ZOO)
    for world in one.values[0].worlds
]


@pytest.mark.examples
@pytest.mark.parametrize(("example", "world"), SCRIPTS)
def test_it_runs_as_a_script(example, world, record_property):
    ended = run_fork(*(*FXTRAIN, "launch", "--ranks", str(world)), example.script, timeout_s=500.0)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out.strip().splitlines()[-1])
    record_property("example", f"{example.path} {json.dumps(told)}")
    assert told.pop("ranks") == world and example.holds(told)
