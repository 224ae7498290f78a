"""Trackers that fail, refuse, hang or are slow, in several threads and processes."""

import os
import threading
import time

import attrs
import pytest

import fxtrain as fx
from fxtrain.trackers import read_run
from tests._slow import slow_after
from tests.trackers._trackers import own_tracker


def test_a_tracker_that_fails_is_named_once_and_the_others_have_everything(ctx, tmp_path, told):
    def fail(native, entry):
        raise OSError(28, "No space left on device")

    _, broken = own_tracker(write=fail)
    with fx.track(tmp_path, ctx, [broken, fx.JsonLines()]) as run:
        for step in range(20):
            run.log({"a": step}, step)
    assert len(read_run(tmp_path).entries) == 20
    assert len(told()) == 2
    assert "Mine failed in log: OSError: [Errno 28] No space left" in told()[0]
    assert told()[1] == "Mine lost 20 entries of this run."


def test_a_tracker_that_cannot_be_opened_is_left_out(ctx, tmp_path, told):
    def fail(config, start):
        raise ConnectionError("no route")

    _, broken = own_tracker(open=fail)
    with fx.track(tmp_path, ctx, [broken, fx.JsonLines()]) as run:
        run.log({"a": 1}, 1)
        assert run.native(broken) is None
    assert len(read_run(tmp_path).entries) == 1
    assert "Mine could not be opened: ConnectionError: no route" in told()[0]


def test_a_full_disk_leaves_whole_lines_and_is_named(ctx, tmp_path, told, monkeypatch):
    """Half of one line reaches the disk before it is full; then there is room again."""
    with fx.track(tmp_path, ctx) as run:
        run.log({"a": 1}, 1)
        run.flush()
        native = run.native(fx.JsonLines)
        real = native.file

        class Full:
            def write(self, data):
                if len(data) < 30:
                    raise OSError(28, "No space left on device")
                return real.write(data[: len(data) // 2])

            def __getattr__(self, name):
                return getattr(real, name)

        (opened,) = run._writer.opened
        opened.native = attrs.evolve(native, file=Full())
        run.log({"a": 2}, 2)
        run.flush()
        opened.native = native
        run.log({"a": 3}, 3)
    assert read_run(tmp_path).curve("a") == [(1, 1.0), (3, 3.0)]
    assert read_run(tmp_path).damaged == 0
    assert "No space left" in told()[0] and "lost 1 entries" in told()[1]


def test_an_ability_that_a_tracker_lacks_is_named_once(ctx, tmp_path, told):
    _, mine = own_tracker()
    with fx.track(tmp_path, ctx, [mine, fx.JsonLines()]) as run:
        run.text("a", "b", 1)
        run.text("a", "b", 2)
    assert told() == ["Mine does not support run.text. The other trackers log it."]
    assert len(read_run(tmp_path).entries) == 2


def test_a_name_that_a_tracker_refuses_is_named_and_logged_elsewhere(ctx, tmp_path, told):
    kept, mine = own_tracker(refuses=lambda name: "it has a space" if " " in name else "")
    with fx.track(tmp_path, ctx, [mine, fx.JsonLines()]) as run:
        for step in (1, 2):
            run.log({"a b": 1, "c": 2}, step)
    assert kept == [(1, {"c": 2.0}), (2, {"c": 2.0})]
    assert read_run(tmp_path).curve("a b") == [(1, 1.0), (2, 1.0)]
    (line,) = told()
    assert "Mine does not accept the name 'a b': it has a space" in line


def test_a_tracker_whose_rules_fail_does_not_stop_the_others(ctx, tmp_path, told):
    def fail(name):
        raise ValueError("no rule")

    kept, mine = own_tracker(refuses=fail)
    with fx.track(tmp_path, ctx, [mine, fx.JsonLines()]) as run:
        run.log({"a": 1}, 1)
        run.log({"a": 2}, 2)
    assert kept == [] and read_run(tmp_path).curve("a") == [(1, 1.0), (2, 2.0)]
    assert "Mine failed in log: ValueError: no rule" in told()[0]


@pytest.mark.slow
def test_a_tracker_that_hangs_is_dropped_and_holds_up_nobody_again(
    ctx, tmp_path, told, monkeypatch
):
    monkeypatch.setattr("fxtrain.trackers.writer._MOST_ENTRIES", 4)
    released = threading.Event()
    _, hanging = own_tracker(write=lambda *_: released.wait())
    last, mine = own_tracker(name="Last")
    run = fx.track(tmp_path, ctx, [fx.JsonLines(), hanging, mine], patience_s=1)
    try:
        for step in range(50):  # waits once, since there is room for four entries
            run.log({"a": step}, step)
        assert run.flush()
        run.close()
    finally:
        released.set()
    assert len(read_run(tmp_path).entries) == len(last) == 50
    (line,) = told()
    assert "Mine does not respond: training has waited 1 s for it" in line


@pytest.mark.parametrize("call", slow_after(1, ["write", "flush", "close", "last_steps"]))
def test_a_run_ends_though_a_tracker_never_returns(ctx, tmp_path, told, call):
    released = threading.Event()
    _, hanging = own_tracker(**{call: lambda *_: released.wait()})
    fx.track(tmp_path, ctx, [own_tracker()[1]]).close()  # so that the next one resumes
    again = {"resume": "folder", "position": fx.Position()}
    try:
        with fx.track(tmp_path, ctx, [hanging, fx.JsonLines()], patience_s=1, **again) as run:
            for step in range(1, 6):
                run.log({"a": step}, step)
            assert run.flush() == (call == "close")
            run.state()
    finally:
        released.set()
    assert len(read_run(tmp_path).entries) == 5
    assert ["Mine does not respond" in line for line in told()] == [True]


def test_a_slow_tracker_loses_nothing(ctx, tmp_path, monkeypatch):
    monkeypatch.setattr("fxtrain.trackers.writer._MOST_ENTRIES", 2)
    kept, mine = own_tracker(write=lambda kept, entry: (time.sleep(0.002), kept.append(entry.step)))
    with fx.track(tmp_path, ctx, [mine]) as run:
        for step in range(50):
            run.log({"a": 1}, step)
    assert kept == list(range(50))


def test_entries_are_written_without_a_flush(ctx, tmp_path):
    seen = [threading.Event() for _ in range(3)]
    _, mine = own_tracker(write=lambda kept, entry: seen[entry.step].set())
    with fx.track(tmp_path, ctx, [mine]) as run:
        for step, written in enumerate(seen):
            run.log({"a": 1}, step)
            written.wait()


def test_several_threads_may_log(ctx, tmp_path):
    def work(who):
        for step in range(100):
            run.log({who: step}, step)

    with fx.track(tmp_path, ctx) as run:
        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    log = read_run(tmp_path)
    for n in range(4):
        assert log.curve(f"t{n}") == [(step, float(step)) for step in range(100)]


def test_a_forked_process_writes_nothing_and_does_not_wait(ctx, tmp_path):
    with fx.track(tmp_path, ctx) as run:
        run.log({"a": 1}, 1)
        child = os.fork()
        if not child:
            try:
                run.log({"a": 2}, 2)
                run.flush()
                run.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        run.log({"a": 3}, 3)
    assert read_run(tmp_path).curve("a") == [(1, 1.0), (3, 3.0)]
