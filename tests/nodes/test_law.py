"""A law of losses: whatever happens to machines, a run ends in time or goes on, and continues."""

import contextlib
import time

import attrs
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.nodes._lab import SCRIPTS, later
from tests.nodes._rows import every_row_once

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.timeout(580)]
TIMEOUT_S = 5.0
ROWS = 240
EVER = 0.0


@attrs.frozen
class Event:
    """What happens to a machine.

    Attributes:
        kind: What it is.
        node: The machine.
        pause_s: Time since the event before.
        lasts_s: How long it lasts, where it can end; 0 for ever.
    """

    kind: str
    node: int
    pause_s: float = 0.0
    lasts_s: float = EVER


KINDS = ("rank killed", "launcher killed", "launcher stopped", "frozen", "cable", "parted", "power")
EVENTS = st.builds(
    Event,
    st.sampled_from(KINDS),
    st.integers(0, 1),
    st.sampled_from((0.0, 0.7, 2.0)),
    st.sampled_from((EVER, 2.0)),
)


def _happen(lab, programs, event):
    node, program = lab.nodes[event.node], programs[event.node]
    undo = {"frozen": node.thaw, "cable": lambda: node.link("up"), "parted": lab.heal}
    with contextlib.suppress(KeyError, ProcessLookupError):  # it has ended by now
        {
            "rank killed": lambda: node.send_signal(program.rank(event.node), 9),
            "launcher killed": lambda: program.send_signal(9),
            "launcher stopped": lambda: program.send_signal(15),
            "frozen": node.freeze,
            "cable": node.cut,
            "parted": lambda: lab.split(event.node),
            "power": node.power_off,
        }[event.kind]()
    if event.lasts_s and event.kind in undo:
        later(event.lasts_s, undo[event.kind]).join()


def _run(lab):
    return [
        node.launch(
            *("--nodes=2", "--main-address=n0", "--shutdown=3", SCRIPTS / "train.py"),
            *("--folder", lab.shared / "runs", "--sleep", "0.2", "--timeout", str(TIMEOUT_S)),
        )
        for node in lab.nodes[:2]
    ]


@given(history=st.lists(EVENTS, min_size=1, max_size=3))
@example([Event("rank killed", 1)])
@example([Event("parted", 1, 0.0, 2.0), Event("power", 0)])
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_history_ends_in_time_and_continues(lab, history):
    lab.reset()
    programs = _run(lab)
    programs[0].wait_for("update 5.")
    for event in history:
        time.sleep(event.pause_s)
        _happen(lab, programs, event)
    start = time.monotonic()
    gone = {e.node for e in history if e.kind == "power"}
    frozen = {e.node for e in history if e.kind == "frozen" and not e.lasts_s}
    there = [program for program in programs if program.node.number not in gone | frozen]
    # A run that goes on takes no longer than this for the updates that are left.
    ended = [program.finish(TIMEOUT_S + 25) for program in there]
    waited_s = time.monotonic() - start
    if any(ended):
        assert waited_s < TIMEOUT_S + 15, (history, waited_s, [p.text[-800:] for p in there])
    for program, code in zip(there, ended, strict=True):
        if code > 0:
            assert "fxtrain launch: " in program.text, program.text
        _nothing_left(program.node)
    _continue(lab)


def _nothing_left(node):
    """A killed launcher's ranks end a little later."""
    deadline = time.monotonic() + 6
    while left := node.left():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _continue(lab):
    """On the same machines, repaired: every row is trained once."""
    for node in lab.nodes[:2]:
        node.thaw()
        node.link("up")
        node.kill_all()
    lab.heal()
    programs = _run(lab)
    assert [program.finish(60) for program in programs] == [0, 0], programs[0].text
    every_row_once(lab, ROWS)
    drafts = [path.name for path in (lab.shared / "runs").iterdir() if "partial" in path.name]
    assert drafts == []
