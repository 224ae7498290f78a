"""Parse and format sizes in bytes."""

import re
from typing import Any

from fxtrain.errors import PlanError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


def read_bytes(size: Any, asked: str = "device_memory") -> int | None:
    """Parse a number or text such as "80GB", "24GiB" or "1.5e10"; None stays None.

    Args:
        size: The size.
        asked: What the size is for, in messages.

    Raises:
        PlanError: the size is malformed.

    Example:
        >>> read_bytes("80GB"), read_bytes("24 GiB")
        (80000000000, 25769803776)
    """
    if size is None or (type(size) is int and size > 0):
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([KMGT]I?)?B?\s*", str(size), re.I)
    try:
        bytes_ = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    except (ValueError, OverflowError):  # 1.2.3, 1e999
        bytes_ = 0
    if bytes_ < 1 or type(size) is bool:
        raise PlanError(
            f'{asked}={size!r}: pass a number of bytes, or text such as "80GB" or "24GiB".'
        )
    return bytes_


def show_bytes(size: int) -> str:
    """Format a size with three or four digits, in decimal units.

    Example:
        >>> show_bytes(12), show_bytes(4_000_000), show_bytes(26_953_000_000)
        ('12 B', '4.00 MB', '27.0 GB')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            value = size / unit
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"
    return f"{size} B"
