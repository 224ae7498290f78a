"""A law of losses: whatever happens to machines, a run ends in time or goes on, and continues."""

import contextlib
import re
import time

import attrs
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from tests._patience import patience, wait_for
from tests.nodes._lab import SCRIPTS, later
from tests.nodes._rows import every_row_once, went_back

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(580)]
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
NETWORK = ("cable", "parted", "frozen", "power")
EVENTS = st.builds(
    Event,
    st.sampled_from(KINDS),
    st.integers(0, 1),
    st.sampled_from((0.0, 0.7, 2.0)),
    st.sampled_from((EVER, 2.0)),
)
# Whom a message blames: the machine that was waited for, or else the one where it failed.
LOST = re.compile(r"rank (\d) on n\d: (?:never joined|left)")
SILENT = re.compile(r"The store of this run does not answer|The launcher that serves the store")
FAILED = re.compile(r"[Nn]ode (\d) \(n\d\)")


def _happen(lab, programs, event):
    node, program = lab.nodes[event.node], programs[event.node]
    undo = {"frozen": node.thaw, "cable": lambda: node.link("up"), "parted": lab.heal}
    with contextlib.suppress(KeyError, IndexError, ProcessLookupError):  # it has ended by now
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


def _start(lab, node, *options):
    return node.launch(
        *("--main-address=n0", "--shutdown=3", *options, SCRIPTS / "train.py"),
        *("--folder", lab.shared / "runs", "--sleep", "0.2", "--timeout", str(TIMEOUT_S)),
    )


def _run(lab):
    return [_start(lab, node, "--nodes=2") for node in lab.nodes[:2]]


def _bounded(examples):
    return settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.mark.slow
@given(history=st.lists(EVENTS, min_size=1, max_size=3))
@example([Event("parted", 1, 0.0, 2.0), Event("power", 0)])
@example([Event("launcher killed", 1)])
@example([Event("launcher killed", 0)])
@_bounded(5)
def test_every_history_ends_in_time_and_continues(lab, history):
    _history(lab, history)


@pytest.mark.parametrize(
    "history",
    [[Event("rank killed", 1), Event("rank killed", 0)], [Event("launcher stopped", 1)]],
    ids=["killed", "stopped"],
)
def test_a_short_history_ends_in_time_and_continues(lab, history):
    _history(lab, history)


def _history(lab, history):
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
        assert waited_s < TIMEOUT_S + 10 * patience(), (
            history,
            waited_s,
            [p.text[-800:] for p in there],
        )
    _same_culprit(history, there)
    for program in there:
        _nothing_left(program.node)
    _whole_files(lab)
    _continue(lab)


def _same_culprit(history, programs):
    """Codes and messages of launchers agree on the machine, and it is one to which it happened."""
    killed = {e.node for e in history if e.kind == "launcher killed"}
    stopped = {e.node for e in history if e.kind == "launcher stopped"}
    told = [program for program in programs if program.node.number not in killed]
    said = {
        program.node.number: _blamed(program)
        for program in told
        if program.code not in (0, 143)  # success, and stopped by SIGTERM
    }
    texts = [history, [program.text[-1500:] for program in programs]]
    hit = {event.node for event in history}
    network = any(event.kind in NETWORK for event in history)
    # Of two machines that do not reach each other, each blames the other.
    assert set(said.values()) <= (hit | {0, 1} if network else hit), texts
    if not network and 0 not in killed:
        assert len({*said.values()}) <= 1, texts
    if not network and not stopped and history:
        assert all(program.code for program in told), texts


def _blamed(program):
    final = program.text.rpartition("fxtrain launch: ")[2]
    first = final.splitlines()[0]
    if (peer := LOST.search(final)) and "CollectiveError" in first:
        return int(peer[1])
    if SILENT.search(final):
        return 0
    failed = FAILED.search(first)
    assert failed, program.text
    return int(failed[1])


def _nothing_left(node):
    """A killed launcher's ranks end a little later."""
    wait_for(lambda: not node.left(), timeout_s=6)


def _whole_files(lab):
    """Every folder with the name of a checkpoint is one."""
    for path in (lab.shared / "runs").glob("update-*"):
        fx.checkpoint.verify(path)


def _continue(lab, texts=()):
    """On the same machines, repaired: every row is trained once."""
    for node in lab.nodes[:2]:
        node.thaw()
        node.link("up")
        node.kill_all()
    lab.heal()
    programs = _run(lab)
    assert [program.finish(60) for program in programs] == [0, 0], programs[0].text
    every_row_once(lab, ROWS)
    went_back(lab, [*texts, programs[0].text])
    drafts = [path.name for path in (lab.shared / "runs").iterdir() if "partial" in path.name]
    assert drafts == []


ELASTIC = st.lists(
    st.builds(
        Event,
        st.sampled_from(("rank killed", "machine killed", "launcher stopped", "join")),
        st.integers(1, 2),
        st.sampled_from((0.0, 1.0, 4.0)),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@given(history=ELASTIC)
@example([Event("join", 2), Event("rank killed", 1, 4.0)])
@example([Event("machine killed", 1), Event("join", 1, 1.0)])
@_bounded(2)
def test_machines_join_and_leave_an_elastic_run(lab, history):
    """The one that serves the rendezvous stays: it ends with success, whatever the others do."""
    lab.reset()
    # Shorter than torch's own times, which are 15 and 30 s.
    settings = ("keep_alive_interval=1", "last_call_timeout=2")
    options = (
        "--rendezvous=c10d",
        "--nodes=3",
        "--min-nodes=1",
        "--restarts=9",
        "--connect-timeout=20",
    )
    options += tuple(f"--rendezvous-option={setting}" for setting in settings)
    programs = {node: _start(lab, lab.nodes[node], *options) for node in (0, 1)}
    everyone = [*programs.values()]
    programs[0].wait_for("update 5.")
    for event in history:
        time.sleep(event.pause_s)
        node = lab.nodes[event.node]
        program = programs.get(event.node)
        there = program is not None and program.code is None and node.left()
        if event.kind == "join" and not there and programs[0].code is None:
            programs[event.node] = _start(lab, node, *options)
            everyone.append(programs[event.node])
        elif event.kind == "machine killed" and there:
            node.kill_all()
            del programs[event.node]
        elif there and event.kind != "join":
            with contextlib.suppress(KeyError, IndexError, ProcessLookupError):
                if event.kind == "launcher stopped":
                    program.send_signal(15)
                else:
                    lines = re.findall(r"rank \d ready pid (\d+)", program.text)
                    node.send_signal(int(lines[-1]), 9)
    texts = [history, [program.text[-1500:] for program in everyone]]
    code = programs[0].finish(150)
    assert code == 0, texts
    for program in programs.values():
        # One that comes when the run is over finds no rendezvous.
        assert program.finish(45) in (0, 1, 2, 143), texts
        _nothing_left(program.node)
    _whole_files(lab)
    # A stopped machine asks all ranks to save and end; what is left is trained now.
    _continue(lab, [program.text for program in everyone])
