"""Columns of floats as text that a browser decodes without parsing numbers."""

import base64
import sys
from array import array
from collections.abc import Iterable

__all__ = ["packed", "unpacked"]


def packed(values: Iterable[float]) -> str:
    """Floats of 64 bits, little-endian, in base64.

    Example:
        >>> unpacked(packed([0.1, float("inf")]))
        [0.1, inf]
    """
    return base64.b64encode(_little(array("d", values)).tobytes()).decode()


def unpacked(text: str) -> list[float]:
    """The inverse of `packed`."""
    return _little(array("d", base64.b64decode(text))).tolist()


def _little(values: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
