"""fx.launch on this node: its number, and the main address."""

import socket
import sys

import fxtrain as fx


def work(x):
    """What each rank runs."""
    import torch

    with fx.detect(device="cpu", timeout_s=30) as ctx:
        return socket.gethostname(), ctx.rank, fx.ops.reduce(torch.tensor(x), ctx, op="sum").item()


if __name__ == "__main__":
    number, main = int(sys.argv[1]), sys.argv[2]
    print(fx.launch(work, (1.5,), ranks=1, nodes=2, node_rank=number, main_address=main))
