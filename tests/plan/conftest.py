"""The small models and engines that tests/strategy and tests/search have too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / room) for room in ("strategy", "search")]
