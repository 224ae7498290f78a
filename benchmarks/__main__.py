"""Every benchmark in turn: `python -m benchmarks`."""

from benchmarks import (
    checkpoint,
    ddp,
    elastic_replicas,
    experts,
    faults,
    fit,
    fsdp,
    gather,
    growth,
    imports,
    loader,
    muon,
    offload,
    placement,
    replica_digests,
    report,
    startup,
    step,
    tokens,
    watch,
)

if __name__ == "__main__":
    for each in (
        step,
        experts,
        fit,
        loader,
        gather,
        ddp,
        fsdp,
        imports,
        startup,
        checkpoint,
        offload,
        growth,
        faults,
        placement,
        elastic_replicas,
        report,
        replica_digests,
        tokens,
        muon,
        watch,
    ):
        each.main()
