"""Local SGD and DiLoCo: replicas that train independently between averages."""

__all__: list[str] = []
