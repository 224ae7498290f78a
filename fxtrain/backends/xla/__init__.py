"""Sharded parameters: torch's fully_shard (FSDP2)."""

__all__: list[str] = []
