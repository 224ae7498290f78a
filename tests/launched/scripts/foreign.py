"""A program without fxtrain, whose rank 1 leaves out a collective; torch records the others."""

import datetime
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

FOLDER = Path(sys.argv[1])
TIMEOUT_S = 2.0 * float(os.environ.get("TEST_PATIENCE", "1"))


def train(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        while not (FOLDER / "pickles" / "rank_0").exists():  # as it is once the others fail
            time.sleep(0.02)
        return
    dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    try:
        train(rank)
    except RuntimeError as error:
        print("failed", str(error)[-40:])
    FOLDER.joinpath("pickles", f"rank_{rank}").write_bytes(_dump_fr_trace())
    FOLDER.joinpath("json", f"rank_{rank}.json").write_bytes(_dump_fr_trace_json())
