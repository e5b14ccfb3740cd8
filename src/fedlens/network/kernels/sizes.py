"""Sizes that the kernels share."""

Padding = tuple[int, int, int, int]  # left, right, top, bottom

PROGRAMS = 264  # twice the processors of a large GPU: as many as keep it busy


def tile(number: int) -> int:
    """The least power of two that holds `number`, and 16 at the least, as `tl.dot` wants it."""
    return max(16, 1 << (number - 1).bit_length())
