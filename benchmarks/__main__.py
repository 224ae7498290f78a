"""Every benchmark in turn: `python -m benchmarks`."""

from benchmarks import ddp, fsdp, gather, imports, loader, startup, step

if __name__ == "__main__":
    for each in (step, loader, gather, ddp, fsdp, imports, startup):
        each.main()
