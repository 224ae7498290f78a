"""A program without fxtrain, whose rank 1 leaves out a collective; torch records the others."""

import datetime
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json


def train(rank: int) -> None:
    dist.all_reduce(torch.ones(2))
    if rank == 1:
        time.sleep(4)
        return
    dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    try:
        train(rank)
    except RuntimeError as error:
        print("failed", str(error)[-40:])
    folder.joinpath("pickles", f"rank_{rank}").write_bytes(_dump_fr_trace())
    folder.joinpath("json", f"rank_{rank}.json").write_bytes(_dump_fr_trace_json())
