"""Connect, gather who is where, add up; then stay for as many seconds as the argument says."""

import os
import socket
import sys
import time

import torch

import fxtrain as fx

begin = time.monotonic()
with fx.detect(device="cpu", timeout_s=float(os.environ.get("WAIT_S", "20"))) as ctx:
    took = time.monotonic() - begin
    who = fx.ops.gather_objects((socket.gethostname(), ctx.local_rank, ctx.node_rank), ctx)
    total = fx.ops.reduce(torch.tensor(ctx.rank + 1.0), ctx, op="sum")
    print(f"rank {ctx.rank} met {who} total {total:g} after {took:.1f} s", flush=True)
    if sys.argv[1:]:
        time.sleep(float(sys.argv[1]))
