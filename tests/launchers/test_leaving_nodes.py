"""Which node leaves a run whose ranks it makes fail, without processes."""

from types import SimpleNamespace

import pytest

from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.built_in.native.agent import _Agent
from fxtrain.launchers.built_in.native.rendezvous import ElasticRendezvous


def _agent(*, failures=2, count=2, least=1, reserve=0, serves=False, elastic=True):
    agent = _Agent.__new__(_Agent)
    agent.launch = LaunchSpec(
        target="train.py", nodes=9, min_nodes=least, rendezvous="c10d" if elastic else "static"
    )
    agent.serves, agent._in_a_row = serves, failures
    agent._ends = SimpleNamespace(count=count)
    handler = ElasticRendezvous.__new__(ElasticRendezvous)
    state = SimpleNamespace(wait_list=set(range(reserve)), redundancy_list={"last"})
    handler._backend = SimpleNamespace(seen=state if reserve else None)
    agent.handler = handler
    return agent


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        ({}, True),
        ({"failures": 1}, False),
        ({"least": 2}, False),
        ({"least": 2, "reserve": 1}, True),
        ({"least": 4, "reserve": 1}, False),
        ({"serves": True}, False),
        ({"elastic": False}, False),
        ({"count": 1}, False),
    ],
)
def test_a_node_leaves_if_its_ranks_failed_twice_and_enough_others_remain(settings, leaves):
    assert _agent(**settings)._can_leave() is leaves
