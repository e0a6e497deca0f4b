"""Base units inside (bytes, seconds, FLOP/s, bytes/s); scaling happens at the door, with these names.

>>> 450 * GB
450000000000
>>> 80 * GIB
85899345920
"""

from __future__ import annotations

from typing import Final

KB: Final = 10**3
MB: Final = 10**6
GB: Final = 10**9
TB: Final = 10**12
KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
TFLOPS: Final = 10**12
GBIT: Final = 10**9 / 8
US: Final = 1e-6
MS: Final = 1e-3

ITEMSIZE: Final = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of one element by precision."""


def format_bytes(nbytes: float) -> str:
    """Binary units, as memory is sold and reported by the allocators.

    >>> format_bytes(80 * GIB)
    '80.0 GiB'
    >>> format_bytes(3 * MIB)
    '3.0 MiB'
    >>> format_bytes(12)
    '12 B'
    """
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {name}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Three digits and the unit that suits.

    >>> format_seconds(12.345), format_seconds(0.0123), format_seconds(4.2e-6)
    ('12.3 s', '12.3 ms', '4.2 us')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    if seconds >= MS:
        return f"{seconds / MS:.3g} ms"
    return f"{seconds / US:.3g} us"


def format_count(count: float) -> str:
    """Parameters and tokens, as the field writes them.

    >>> format_count(8_030_261_248), format_count(125e6), format_count(1.01e12)
    ('8.03B', '125M', '1.01T')
    """
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return f"{count:.0f}"
