"""Every benchmark in turn: `python -m benchmarks`."""

from benchmarks import ddp, gather, imports, loader, startup, step

if __name__ == "__main__":
    for each in (step, loader, gather, ddp, imports, startup):
        each.main()
