"""Imports what the engines' ranks import and prints the versions: the images' health check.

python -m orchestrator.versions
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

from orchestrator.detect import modules_of_engines

OPTIONAL = ("transformer_engine", "flash_attn", "apex", "deep_ep")
"""Kernels that any engine may use where they are there."""


def main() -> int:
    """Exit status: 0 where all engines can be imported; 1, and the reason on the screen, where one can't."""
    failed = False
    with suppress(Exception):  # torch may be what can't be imported
        importlib.import_module("orchestrator.cpu.eager")  # as a rank begins: without a GPU no compiler is loaded
    for name in (*modules_of_engines(), *OPTIONAL):
        try:
            module = importlib.import_module(name)
            print(f"{name} {getattr(module, '__version__', 'of unknown version')}")
        except Exception as error:  # a library that is built against another torch raises what it likes
            if name in OPTIONAL and isinstance(error, ModuleNotFoundError):
                print(f"{name} is not installed")
                continue
            print(f"{name} can't be imported: {type(error).__name__}: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
