"""Keeps torch's compiler from being loaded without a GPU, where nothing is compiled. To be imported before the engines.

megatron-core 0.16.1 decorates its fusions with `torch.compile` when it is imported (jit.py:22), which loads the compiler: 2.1 of the 5.6
CPU seconds that a rank needs to import its worker (2 cores, 2026-11-22). On a CPU a first call would also start a C++ compiler.
DeepSpeed's hooks of ZeRO-3 load it to keep functions out of what is compiled, and torch's optimizers at their first use
for the same reason (optim/optimizer.py:59, :680), another 1.6 CPU seconds.
"""

from __future__ import annotations

from typing import Any

import torch


def _as_written(function: Any = None, *_: Any, **options: Any) -> Any:
    """What `torch.compile` and `torch.compiler.disable` are called as: with the function, or with options as a decorator."""
    return _as_written if function is None else function


def _undecorated(kind: type[torch.optim.Optimizer], name: str) -> Any:
    method = getattr(kind, name)
    return getattr(method, "__wrapped__", method)


if not torch.cuda.is_available():
    torch.compile = _as_written
    torch.compiler.disable = _as_written
    for _name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        setattr(torch.optim.Optimizer, _name, _undecorated(torch.optim.Optimizer, _name))
    # The decorator also says that a step is not differentiated.
    torch.optim.AdamW.step = torch.no_grad()(_undecorated(torch.optim.AdamW, "step"))
