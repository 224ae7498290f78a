"""The example of DeepSpeed from its own config."""

import pytest

from tests.examples._cases import DEEPSPEED, on_pools

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]


def test_it_trains_as_torch_does_on_any_number_of_ranks(clusters):
    on_pools(clusters, DEEPSPEED)
