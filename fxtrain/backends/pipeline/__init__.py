"""Pipeline parallelism: torch.distributed.pipelining."""

__all__: list[str] = []
