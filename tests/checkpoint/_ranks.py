"""Ranks of a pool that tests of checkpoints call."""

import importlib

__all__ = ["ready"]


def ready(pool):
    """A pool whose ranks have loaded what takes seconds, while nobody waits in a collective."""
    pool.run(_load)
    return pool


def _load(_):
    importlib.import_module("torch.distributed.fsdp")
    importlib.import_module("torch.distributed.tensor.parallel")
