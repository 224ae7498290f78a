"""SageMaker."""

__all__: list[str] = []
