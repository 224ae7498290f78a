"""A program that ends without asking about a save in the background: waits, and exits with 1."""

import subprocess
import sys

import pytest

import fxtrain as fx

# Imports torch once, and tries each way to end in a fork.
PROGRAM = """
import atexit, os, resource, sys, threading, time
import torch
import fxtrain as fx
from fxtrain.checkpoint import saving

folder, ways = sys.argv[1], sys.argv[2:]
for way in ways:
    pid = os.fork()
    if not pid:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sys.stdout.write(f"code {way} {code}\\n")
    sys.stdout.flush()
else:
    os._exit(0)

sys.stderr = sys.stdout
atexit.register(lambda: print("registered before"))
ctx = fx.detect(env={}, device="cpu")
model = fx.wrap(torch.nn.Linear(600, 600), ctx)
fails, _, how = way.partition(":")
if fails == "fails":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
write = saving.write_file
go = threading.Event()
def slow(*args):
    # Not before the script has ended, and some time after.
    threading.main_thread().join() if how != "asks" else None
    time.sleep(0.1)
    return write(*args)
saving.write_file = slow
saving = fx.save(f"{folder}/{way}", ctx, model, background=True)
if how == "exits":
    sys.exit(0)
if how == "exits with 3":
    sys.exit(3)
if how == "raises":
    raise ValueError("its own")
if how == "asks":
    try:
        saving.result()
    except fx.CheckpointError:
        print("handled")
"""

WAYS = {  # the code, how often the error is shown
    "fails:ends": (1, 1),
    "fails:exits": (1, 1),
    "fails:exits with 3": (1, 1),
    "fails:raises": (1, 1),
    "fails:asks": (0, 0),
    "works:ends": (0, 0),
    "works:exits with 3": (3, 0),
}


@pytest.mark.slow
def test_the_end_waits_for_a_save_and_tells_of_its_failure(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *WAYS],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    said = dict(zip(WAYS, ended.stdout.split("code ")[:-1], strict=True))
    # What comes before "code" of the next is of the one before.
    codes = [line for line in ended.stdout.splitlines() if line.startswith("code ")]
    for way, code in zip(WAYS, codes, strict=True):
        wanted, shown = WAYS[way]
        assert code == f"code {way} {wanted}", ended.stdout
        assert said[way].count("was not saved") == shown, said[way]
        assert said[way].count("registered before") == 1
        assert ("its own" in said[way]) == way.endswith("raises")
        whole = fx.latest(tmp_path / way)
        assert (whole is not None) == way.startswith("works")
        if whole is not None:
            fx.checkpoint.verify(whole)
    assert "Call result()" in said["fails:ends"]
