"""Every strategy on a device that is not the CPU gives what one process gives on the CPU."""

import pytest

import fxtrain as fx
from fxtrain.testing import LAWS, Terms
from tests.cluster.test_laws import CUTS
from tests.cluster.test_local import HOLD

pytestmark = pytest.mark.timeout(300)

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


# At one rank these plans leave the module as it is: test_engines.py has torch's engines over NCCL.
@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("strategy", [fx.DDP(), fx.FSDP()], ids=["ddp", "fsdp"])
def test_one_rank_of_nccl(nccl, law, strategy):
    law(nccl, fx.Plan(strategy=strategy), terms=TERMS)


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_tensor_parallelism_at_one_rank(nccl, law):
    law(nccl, fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=CUTS))), terms=TERMS)
