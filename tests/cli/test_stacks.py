"""`fxtrain diagnose` and `fxtrain stacks` on records of ranks in files."""

import contextlib
import io
import json
import logging
import os
import pickle
import platform
import time

import pytest
import torch

import fxtrain as fx
from fxtrain.cli import main
from fxtrain.diagnosis.stacks import Frame, ask, groups_of, process_start, read_stands, unreported
from tests._slow import slow_after

fr_trace = pytest.importorskip(
    "torch.distributed.flight_recorder.fr_trace", reason="torch 2.9 has no reader of its traces"
)
WAIT = "/v/site-packages/torch/distributed/c10d.py", 9, "wait"
READ = "/me/train.py", 7, "read_rows"
MAIN = "/me/train.py", 3, "<module>"


def _calls(*numbers, completed=16, ranks=(0, 1, 2, 3)):
    """The collectives of a rank: barriers, and number 17 a gather."""
    last = [
        [n, *(("gather", "int64[2]") if n == 17 else ("barrier", "")), n * 10**9] for n in numbers
    ]
    return {"world": {"ranks": ranks, "completed": completed, "last": last}}


def _write(folder, rank, frames, *, size=4, why="asked", **fields):
    record = {
        "rank": rank,
        "world_size": size,
        "host": f"n{rank // 2}",
        "pid": 0,
        "process_start": "",
        "signal": False,
        "main_thread": 255,
        "why": why,
        "time": time.time() + 1,
        "asked": 0.0,
        "models": [{"updates": 12, "micro": 0}],
        "timeout_ms": 5000,
        "calls": {},
        "torch_calls": [],
        "host_memory_bytes": 1,
        "device_memory_bytes": 0,
        **fields,
    }
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    text = ["Timeout (0:00:05)!", "Thread 0xee (most recent call first):", lines[0], ""]
    text += ["Thread 0x00ff (most recent call first):", *lines]
    (folder / f"rank-{rank}.json").write_text(json.dumps(record))
    (folder / f"rank-{rank}.stacks").write_text("\n".join(text))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "stacks"
    folder.mkdir()
    for rank in (0, 1, 3):
        _write(folder, rank, [WAIT, MAIN])
    _write(folder, 2, [READ, MAIN])
    return tmp_path


def test_the_rank_that_does_not_wait_is_apart(run, capsys):
    assert main(["diagnose", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "rank 2 on n1: apart from the others, at /me/train.py:7 in read_rows, after" in shown
    assert "ranks 0-1, 3 on n0, n1: waiting at /me/train.py:3 in <module>, after 12 upd" in shown
    assert shown.index("Stack of rank 2 (1 with") < shown.index("Stack of rank 0 (3 with")


def test_the_collective_that_ranks_have_started_is_named(run, capsys):
    for rank in (0, 1, 3):
        _write(run / "stacks", rank, [WAIT, MAIN], calls=_calls(16, 17))
    main(["diagnose", str(run)])
    assert "updates, in gather(int64[2]), call 17 of world" in capsys.readouterr().out


def test_of_two_ranks_the_one_that_works_is_apart(tmp_path, capsys):
    _write(tmp_path, 0, [READ, MAIN], size=2)
    _write(tmp_path, 1, [WAIT, MAIN], size=2)
    main(["diagnose", str(tmp_path)])
    assert "rank 0: apart from the others" in capsys.readouterr().out


def test_ranks_that_all_wait_in_one_place_are_one_group(tmp_path, capsys):
    for rank in range(2):
        _write(tmp_path, rank, [WAIT, MAIN], size=2)
    (group,) = groups_of(read_stands(tmp_path))
    assert group[0].stack == (Frame(*WAIT), Frame(*MAIN))
    main(["diagnose", str(tmp_path)])
    assert "apart" not in capsys.readouterr().out


def test_missing_ranks_and_those_of_an_earlier_attempt(tmp_path, capsys):
    _write(tmp_path, 0, [WAIT, MAIN], size=3)
    _write(tmp_path, 3, [READ, MAIN], size=4, time=1.0)
    main(["diagnose", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "1 of 3 ranks wrote where they stand" in shown
    assert "No record of ranks 1-2 is in this folder" in shown
    assert "read_rows" not in shown


@pytest.fixture
def torchfrtrace(caplog):
    """What torch's command logs, called in this process."""

    def call(*words):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="Flight Recorder"):
            fr_trace.main([*map(str, words)])
        return caplog.text

    return call


@pytest.mark.parametrize("oldest", [9, 10, 12])
def test_torchfrtrace_names_the_rank_that_has_not_started_a_collective(
    run, capsys, torchfrtrace, oldest
):
    """A rank that has forgotten the oldest calls is not missing in them."""
    for rank in (0, 1, 3):
        _write(run / "stacks", rank, [WAIT, MAIN], calls=_calls(*range(10, 18)))
    _write(run / "stacks", 2, [READ, MAIN], calls=_calls(*range(oldest, 17)))
    ask(run / "stacks", patience_s=0.1)
    main(["diagnose", str(run)])
    dumps = run / "stacks" / "flight_recorder"
    assert f"torchfrtrace {dumps}\n" in capsys.readouterr().out
    said = torchfrtrace(dumps)
    assert said.count("Not all ranks joining collective, sequence number: 17") == 1
    assert said.count("sequence number") == 1
    assert "collective: gloo:all_gather gather\n" in said and "missing ranks: {2}" in said
    assert f"{MAIN[2]} at {MAIN[0]}:{MAIN[1]}" in said


def test_torchfrtrace_reads_the_dumps_of_ranks_that_are_not_all_there(run, capsys, torchfrtrace):
    for rank in (0, 1, 3):
        _write(run / "stacks", rank, [WAIT, MAIN], calls=_calls(16, 17))
    (run / "stacks" / "rank-2.json").unlink()
    ask(run / "stacks", patience_s=0.1)
    main(["diagnose", str(run)])
    dumps = run / "stacks" / "flight_recorder"
    assert f"torchfrtrace --allow-incomplete-ranks {dumps}\n" in capsys.readouterr().out
    assert "we missed FR dumps from ranks ({2})" in torchfrtrace("--allow-incomplete-ranks", dumps)


def test_frames_of_the_script_are_shown_however_deep_libraries_are(tmp_path, capsys):
    deep = [WAIT] * 20
    _write(tmp_path, 0, [*deep, READ, *deep[:3], MAIN], size=1)
    main(["diagnose", str(tmp_path)])
    shown = capsys.readouterr().out.split("innermost last:\n")[1].splitlines()
    assert [line.strip() for line in shown[:4]] == [
        "/me/train.py:3 in <module>",
        "(3 more of libraries)",
        "/me/train.py:7 in read_rows",
        "(8 more of libraries)",
    ]
    assert len(shown) == 4 + 12


def test_json_has_records_and_stacks(run, capsys):
    assert main(["diagnose", str(run), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)
    assert ranks[2]["stack"][0] == {"file": READ[0], "line": READ[1], "function": READ[2]}


def test_a_record_of_an_older_version_is_named(run, capsys):
    """Before collectives were written for torchfrtrace."""
    path = run / "stacks" / "rank-1.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "torch_calls"}))
    assert main(["diagnose", str(run)]) != 0
    assert (
        "rank-1.json is not a record of a rank: it has no torch_calls. If another version of "
        "fxtrain wrote it, use that version."
    ) in capsys.readouterr().err
    path.write_text("[]")
    assert main(["diagnose", str(run)]) != 0
    assert "rank-1.json is not a record of a rank" in capsys.readouterr().err


def test_a_process_that_has_taken_the_number_of_a_rank_gets_no_signal(run):
    """`pid` 0 would be this process's group; the start of the process is compared first."""
    for rank in range(4):
        _write(run / "stacks", rank, [WAIT, MAIN], signal=True, process_start="1")
    assert len(ask(run / "stacks", patience_s=0.1)) == 4


@pytest.mark.parametrize("installed", slow_after(1, [False, True]))
def test_why_a_silent_rank_has_older_stacks(run, monkeypatch, capsys, tmp_path, installed):
    here = {
        "host": platform.node(),
        "pid": os.getpid(),
        "process_start": process_start(os.getpid()),
    }
    _write(run / "stacks", 2, [READ, MAIN], **here)
    os.utime(run / "stacks" / "rank-2.stacks", (1, 1))
    fails = tmp_path / "py-spy"
    fails.write_text("#!/bin/sh\necho Error: Permission denied >&2\nexit 1\n")
    fails.chmod(0o700)
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(fails) if installed else None)
    assert main(["stacks", str(run), "--patience-s=0.1"]) == 0
    why = (
        "Error: Permission denied" if installed else "py-spy is not installed (pip install py-spy)"
    )
    told = f"rank 2: the stack is an older one; no answer: {why}\n"
    assert told in capsys.readouterr().out


def test_the_launcher_tells_what_rank_0_could_not(run):
    assert unreported(run / "stacks") == ""
    _write(run / "stacks", 2, [READ, MAIN], why="no progress for 5 s")
    assert "apart from the others" in unreported(run / "stacks")
    _write(run / "stacks", 2, [READ, MAIN], why="no progress for 5 s", time=1.0)
    assert unreported(run / "stacks") == ""  # it is told


def test_a_folder_without_records_is_named(tmp_path, capsys):
    assert main(["stacks", str(tmp_path)]) != 0
    assert f"{tmp_path} has no records of ranks. Pass the folder" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[", '{"rank": 0, "main_thread": "x"}', '{"rank": 0}'])
def test_damaged_records_are_named(tmp_path, capsys, text):
    _write(tmp_path, 0, [WAIT])
    (tmp_path / "rank-0.json").write_text(text)
    assert main(["diagnose", str(tmp_path)]) != 0
    assert "rank-0.json is not a record of a rank" in capsys.readouterr().err


def _dump(folder, rank, *numbers, completed=0, line=5, ranks="[0, 1, 2]", name="nccl_trace_rank_"):
    """A file of torch's Flight Recorder, as NCCL's."""
    entries = [
        {
            "frames": [{"name": "step", "filename": "/me/train.py", "line": line}],
            "process_group": ("0", "default_pg"),
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": n,
            "p2p_seq_id": 0,
            "input_sizes": [[n]],
            "input_dtypes": ["Float"],
            "state": "completed" if n <= completed else "scheduled",
            "time_created_ns": n,
            "is_p2p": False,
        }
        for n in numbers
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    file = folder / f"{name}{rank}"
    dump = {"version": "2.10", "pg_config": config, "entries": entries}
    file.write_bytes(pickle.dumps(dump, protocol=2))
    return file


def test_ranks_of_another_program_wait_in_the_first_collective_that_is_not_completed(
    tmp_path, capsys
):
    """A rank may have started several, since those of NCCL do not wait."""
    for rank in (0, 2):
        _dump(tmp_path, rank, 1, 2, 3, 4, completed=2)
    behind = _dump(tmp_path, 1, 1, 2, completed=2, line=9)
    assert main(["diagnose", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 ranks wrote" in shown
    assert "rank 1: apart from the others, last seen at /me/train.py:9 in step, in all_r" in shown
    assert "ranks 0, 2: waiting at /me/train.py:5 in step, in all_reduce(Float[3]), call 3" in shown
    main(["diagnose", str(behind)])
    shown = capsys.readouterr().out
    assert "1 of 3 ranks wrote" in shown and "No record of ranks 0, 2 is in" in shown


def test_dumps_of_our_own_ranks_are_read_too(run, capsys):
    _write(run / "stacks", 2, [READ, MAIN], calls=_calls(15, 16))
    for rank in (0, 1, 3):
        _write(run / "stacks", rank, [WAIT, MAIN], calls=_calls(16, 17))
    ask(run / "stacks", patience_s=0.1)
    main(["diagnose", str(run / "stacks" / "flight_recorder")])
    shown = capsys.readouterr().out
    assert "rank 2: apart from the others, last seen at an unknown line, in all_gather bar" in shown
    assert "ranks 0-1, 3: waiting at /me/train.py:3 in <module>, in all_gather gather(" in shown


class _Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit('it runs code')",)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        b"{",
        b"[]",
        pickle.dumps(_Runs()),
        pickle.dumps({"entries": [_Runs()], "pg_config": {}}),
        pickle.dumps({"entries": [{}], "pg_config": {}}),
        b'{"entries": [], "pg_config": []}',
    ],
)
def test_a_file_that_is_no_dump_is_named_and_runs_no_code(tmp_path, capsys, raw):
    (tmp_path / "rank_0").write_bytes(raw)
    assert main(["diagnose", str(tmp_path)]) == 2
    assert f"{tmp_path / 'rank_0'} is not a dump of torch's Flight Rec" in capsys.readouterr().err


def test_dumps_that_do_not_belong_together_are_named(tmp_path, capsys):
    first, second = (_dump(tmp_path, 0, 1, name=name) for name in ("a_", "b_"))
    assert main(["diagnose", str(first), str(second)]) == 2
    assert f"{first} and {second} are both dumps of rank 0" in capsys.readouterr().err
    first.write_bytes(_dump(tmp_path, 0).read_bytes())
    assert main(["diagnose", str(first)]) == 2
    assert "contain no collective" in capsys.readouterr().err
    unnamed = tmp_path / "dump"
    unnamed.touch()
    assert main(["diagnose", str(unnamed)]) == 2
    assert "whose names end in a rank" in capsys.readouterr().err


@pytest.mark.parametrize("how", slow_after(1, ["track", "save", "neither"]))
def test_a_run_without_progress_is_diagnosed_by_its_own_folder(tmp_path, monkeypatch, how):
    """The folder of the launch may be a temporary one."""
    monkeypatch.chdir(tmp_path)
    env = {"FXTRAIN_STACKS": str(tmp_path / "launch")}
    with fx.detect(env=env, device="cpu", timeout_s=0.4) as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, optimizer=torch.optim.SGD)
        if how == "save":
            fx.save("other run", ctx, model, position=fx.Position())
        run = fx.track("a run", ctx, ()) if how == "track" else contextlib.nullcontext()
        with run, contextlib.redirect_stderr(io.StringIO()) as told:
            batch = fx.batch(torch.ones(1, 2), ctx)  # an update is progress, after which it hangs
            fx.update(ctx, batch, model, model(batch.data).mean())
            while "no progress" not in told.getvalue():  # as long as a hang lasts
                time.sleep(0.01)
    run = {"track": tmp_path / "a run", "save": tmp_path / "other run"}.get(how)
    assert (run is None) == ("To print this again" not in told.getvalue())
    if run is not None:
        assert f"fxtrain diagnose '{run}'" in told.getvalue()
        (stand,) = read_stands(run / "stacks")
        assert stand.line.file == __file__
