"""Every strategy on a device that is not the CPU gives what one process gives on the CPU."""

import pytest

import fxtrain as fx
from fxtrain.testing import LAWS, Terms
from tests.cluster.test_local import HOLD

pytestmark = [pytest.mark.shadow, pytest.mark.timeout(300)]

# Sums over several tensors at once are rounded in another order than on the CPU.
TERMS = Terms(exact=False)
PLANS = {
    "ddp": fx.Plan(strategy=fx.DDP()),
    "zero1": fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
    "fsdp": fx.Plan(strategy=fx.FSDP()),
    "fsdp, offloaded": fx.Plan(strategy=fx.FSDP(offload=True)),
}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_one_rank(one, law):
    law(one, fx.Plan(strategy=fx.Single()), terms=TERMS)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks(two, law, name):
    law(two, PLANS[name], terms=TERMS)


@pytest.mark.parametrize("law", HOLD, ids=lambda law: law.__name__)
def test_replicas_that_average(two, law):
    law(two, fx.Plan(local=fx.LocalSGD(every=1)), terms=TERMS)
