"""Writes images as PNG files, without a package."""

import struct
import zlib

from torch import Tensor

__all__ = ["png"]

_COLOURS = {1: 0, 3: 2, 4: 6}  # PNG's numbers of grey, RGB and RGBA


def png(image: Tensor) -> bytes:
    """The PNG file of an image.

    Args:
        image: uint8 on the CPU, contiguous, of shape (height, width, channels), with 1, 3 or 4
            channels.

    Example:
        >>> import torch
        >>> png(torch.zeros(2, 2, 3, dtype=torch.uint8))[:4]
        b'\\x89PNG'
    """
    height, width, channels = image.shape
    pixels = bytes(image.flatten().tolist())
    row = width * channels
    # A zero before each row means that its bytes are not filtered.
    lines = b"".join(b"\0" + pixels[start : start + row] for start in range(0, len(pixels), row))
    head = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    parts = (_part(b"IHDR", head), _part(b"IDAT", zlib.compress(lines)), _part(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _part(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
