"""First of what the pool's fork server imports: no garbage is looked for meanwhile, a CPU second of six."""

from __future__ import annotations

import gc
import sys

if sys.argv == ["-c"]:  # the fork server; pytest imports this file too, to look for doctests
    gc.set_threshold(1_000_000)
