"""Turns collections of garbage off while the engines are imported. To be imported before all else by what a rank runs; in any other program
that imports a worker (a user's own, pytest), nothing changes.

Importing the engines makes half a million objects that stay. Python looks through those that it has again and again meanwhile: 0.4 of the
2.5 CPU seconds that a rank needs to import its worker (2 cores, 2026-11-23); and later in each full collection, 0.24 s.
"""

from __future__ import annotations

import gc
import sys

THRESHOLDS = gc.get_threshold()


def freeze_imported() -> None:
    """Leaves what exists by now out of later collections, which are as often as before: they pass over the modules. To be called once
    everything is imported."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


_program = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m`
if _program is not None and _program.name.startswith(f"{__package__}."):
    gc.set_threshold(1_000_000)
