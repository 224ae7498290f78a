"""A crash of torch's profiler over gloo, without fxtrain: see docs/profiling.md. Not a test.

A thread of gloo ends the event of a collective that was called while the profiler ran. If the
profiler has stopped meanwhile, that writes into freed memory. Most runs with torch 2.13 on Linux
end with SIGSEGV or SIGABRT within a few cycles.
"""

import ctypes
import threading

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

CALLS = 2000


def main():
    ctypes.CDLL(None).mallopt(-3, 4096)  # glibc returns freed blocks to the system at once
    store, ranks = dist.HashStore(), {}

    def join(rank):
        ranks[rank] = dist.ProcessGroupGloo(store, rank, 2)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def reduce_all(rank):
        values = [torch.ones(4) for _ in range(CALLS)]
        return [ranks[rank].allreduce([value], dist.AllreduceOptions()) for value in values]

    for cycle in range(20):
        with profile(activities=[ProfilerActivity.CPU]):
            works = reduce_all(0)
        for work in [*reduce_all(1), *works]:  # the other rank joins after the profiler's end
            work.wait()
        for size in range(1000):
            torch.ones(size)
        print("cycle", cycle, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
