"""Reports of runs: one HTML page that needs no network, or one curve as a picture.

Nothing here imports torch, since that would take longer than most reports.
"""

from fxtrain.curves.page import page_of, picture_of
from fxtrain.curves.reading import (
    Curve,
    RunCurves,
    RunReader,
    check_is_run,
    file_of,
    read_curves,
    sparkline,
)

__all__ = [
    "Curve",
    "RunCurves",
    "RunReader",
    "check_is_run",
    "file_of",
    "page_of",
    "picture_of",
    "read_curves",
    "sparkline",
]
