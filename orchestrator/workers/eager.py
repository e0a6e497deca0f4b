"""To be imported before megatron-core: without a GPU, what it marks for compilation is left as it is written.

megatron-core 0.16.1 decorates its fusions with `torch.compile` when it is imported (jit.py:22), which loads torch's compiler: 2.1 of the
5.6 CPU seconds that a rank needs to import this worker (2 cores, 2026-11-22). On a CPU a first call would also start a C++ compiler.
"""

from __future__ import annotations

from typing import Any

import torch


def _as_written(function: Any = None, **options: Any) -> Any:
    """What `torch.compile` is called as: with the function, or with options as a decorator."""
    return _as_written if function is None else function


if not torch.cuda.is_available():
    torch.compile = _as_written
