"""Numbers with a unit, as clusters and keys write them: 80 GiB, 400 Gbit/s, 1.9 us."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from orchestrator.errors import InputError
from orchestrator.key import Key, parse, shown
from orchestrator.units import GB, GBIT, GIB, KB, KIB, MB, MIB, MS, TB, TFLOPS, US

BYTES: Final = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB}
RATES: Final = {"B/s": 1, "KB/s": KB, "MB/s": MB, "GB/s": GB, "TB/s": TB, "Mbit/s": GBIT / 1000, "Gbit/s": GBIT, "Tbit/s": GBIT * 1000}
SECONDS: Final = {"s": 1.0, "ms": MS, "us": US, "ns": 1e-9}
LIMITS: Final = {"B": (1.0, 1e18), "B/s": (1.0, 1e18), "s": (1e-12, 1e6), "FLOP/s": (1.0, 1e21)}
"""Least and most of a quantity, by its base unit: no part of a computer lies beyond."""
FLOPS: Final = {"FLOP/s": 1, "GFLOP/s": TFLOPS / 1000, "TFLOP/s": TFLOPS, "PFLOP/s": TFLOPS * 1000}


def quantity(key: str, text: Any, units: Mapping[str, float], *, zero: bool = False, most: float | None = None) -> float:
    """A number with one of these units, in the base unit; `most`: where there is a lower limit than its unit's. Raises InputError.

    >>> quantity("bandwidth", "400 Gbit/s", RATES), quantity("memory", "80GiB", BYTES)
    (50000000000.0, 85899345920.0)
    """
    example = f"a number and a unit, such as 4 {list(units)[-1]}"
    if not isinstance(text, str):
        raise InputError(key, None if text is None else shown(text), f"needs {example}")
    number = text.rstrip("/abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ").strip()
    unit = text.strip()[len(number) :].strip()
    if unit not in units:
        raise InputError(key, shown(text), f"needs {example}", units)
    parse(Key(name=key, type=float, help=""), number)
    value = float(Decimal(number) * Decimal(str(units[unit])))  # 1.9 us is 1.9e-06, not 1.8999999999999998e-06
    if value < 0 or (value == 0 and not zero):
        raise InputError(key, shown(text), "must be above 0")
    base = next(name for name, factor in units.items() if factor == 1)
    least, greatest = LIMITS[base]
    greatest = greatest if most is None else most
    if value and not least <= value <= greatest:
        raise InputError(key, shown(text), f"must be from {least:g} to {greatest:g} {base}")
    return value
