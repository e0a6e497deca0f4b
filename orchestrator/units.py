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

ALMOST: Final = 0.9995
"""Share of a unit from which on three digits round to one of it."""
ITEMSIZE: Final = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes of one element by precision."""


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units, as memory is sold and reported by the allocators.

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


def format_amount(amount: float, digits: int = 3) -> str:
    """The amount with so many digits, or with all that stand before the point.

    >>> format_amount(1234567.8), format_amount(12.345), format_amount(0.01234), format_amount(999.7), format_amount(99.8, 2)
    ('1,234,568', '12.3', '0.0123', '1,000', '100')
    """
    return f"{amount:,.0f}" if amount >= 10**digits - 0.5 else f"{amount:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """Seconds in three digits and the unit that suits.

    >>> format_seconds(12.345), format_seconds(0.0123), format_seconds(4.2e-6), format_seconds(8654.4)
    ('12.3 s', '12.3 ms', '4.2 us', '8654 s')
    """
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for size, name in ((1.0, "s"), (MS, "ms")):
        if seconds >= size * ALMOST:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds / US:.3g} us"


def format_count(count: float) -> str:
    """Parameters and tokens, as the field writes them.

    >>> format_count(8_030_261_248), format_count(125e6), format_count(1.01e12)
    ('8.03B', '125M', '1.01T')
    >>> format_count(1.47e15), format_count(999.9e9), format_count(512)
    ('1,470T', '1T', '512')
    """
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size * ALMOST:
            return f"{format_amount(count / size)}{name}"
    return f"{count:.0f}"
