"""Context parallelism: sequences split over ranks."""

__all__: list[str] = []
