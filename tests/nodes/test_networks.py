"""Networks that are slow, lose packets, fall apart for a time, or have no IPv4 or no IPv6."""

import time

import pytest

from tests._patience import patience
from tests.nodes._lab import IPV6, SCRIPTS, later

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(200)]
SLOW = pytest.mark.slow


def _trained(lab, *words, options=(), main="n0"):
    """A run on two nodes, which ends well; what the first one wrote."""
    programs = [
        node.launch(
            *("--nodes=2", f"--main-address={main}", *options, SCRIPTS / "train.py"),
            *("--folder", lab.shared / "runs", *words),
        )
        for node in lab.nodes[:2]
    ]
    codes = [program.finish(150) for program in programs]
    assert codes == [0, 0], "\n".join(program.text[-3000:] for program in programs)
    return programs[0].text


@pytest.mark.parametrize(
    ("delay_ms", "loss"),
    [
        pytest.param(1, 0.0, marks=SLOW),
        pytest.param(10, 0.01),
        pytest.param(50, 0.0, marks=SLOW),
        pytest.param(50, 0.01, marks=SLOW),
    ],
)
def test_a_slow_network_changes_the_time_only(lab, delay_ms, loss):
    with lab.slow_network(delay_ms / 1000, loss):
        slow = _trained(lab, "--timeout", "30")
    lab.reset()
    assert _done(slow) == _done(_trained(lab))


def _done(text):
    return next(line for line in text.splitlines() if line.startswith("done"))


def test_machines_with_ipv6_only(lab):
    with lab.only_ipv6():
        _trained(lab)


@pytest.mark.slow
def test_the_main_address_may_be_one_of_ipv6(lab):
    with lab.only_ipv6():
        _trained(lab, main=f"{IPV6}10")


def test_machines_without_ipv6(lab):
    with lab.without_ipv6():
        _trained(lab)


def _parted(lab, timeout_s, seconds, *options):
    programs = [
        node.launch(
            *("--nodes=2", "--main-address=n0", *options, SCRIPTS / "train.py"),
            *("--folder", lab.shared / "runs", "--sleep", "0.3", "--rows", "480"),
            *("--timeout", str(timeout_s)),
        )
        for node in lab.nodes[:2]
    ]
    programs[0].wait_for("update 6.")
    start = time.monotonic()
    lab.split(1)
    later(seconds, lab.heal)
    return programs, start


@pytest.mark.slow
def test_a_network_that_heals_within_the_timeout_is_waited_for(lab):
    programs, _ = _parted(lab, 60, 20)
    assert [program.finish(120) for program in programs] == [0, 0], programs[0].text
    assert "done" in programs[0].text


@pytest.mark.slow
def test_a_network_that_heals_after_the_timeout_is_an_error_on_both_sides(lab):
    programs, start = _parted(lab, 6, 30)
    assert [program.finish(30) for program in programs] == [1, 1]
    assert time.monotonic() - start < 18 * patience()
    assert "rank 1 on n1: never joined" in programs[0].text
    assert "The store of this run does not answer" in programs[1].text
