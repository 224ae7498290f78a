"""Splits of the small transformer into stages."""

import fxtrain as fx

FOUR = ("blocks.0", "blocks.1", "norm")
SHARDS = fx.Mesh(pipeline=2, shard=2)
SPLITS = fx.Mesh(pipeline=2, tensor=2)


# Plans and models that do not fit.


def held(**options):
    return fx.PP(stages=fx.FSDP(**options))
