"""What megatron/training asks of a GPU beside megatron.core (cpu/shims.py), answered on a machine without one. No arithmetic is changed."""

from __future__ import annotations

import importlib.util
import sys
import types
import typing
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from orchestrator.cpu import eager, shims  # noqa: F401  (eager: before megatron.core)

MEMORY = 4 << 30
"""Bytes that a device is said to have; nothing depends on it."""
HELPERS = "megatron.core.datasets.helpers_cpp"
TRITON_ALONE = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
TENSOR_TYPES = {"Float": torch.float32, "Long": torch.int64, "Int": torch.int32, "Double": torch.float64, "Byte": torch.uint8}
FACTORIES = ("rand", "randn", "randint", "rand_like", "ones_like", "full_like")


def apply() -> None:
    """Makes megatron.training run without a GPU; to be called before it is imported."""
    torch.set_num_threads(1)
    without_triton()
    _compiled_helpers()
    if not hasattr(typing, "override"):  # from 0.17 on Megatron is for Python 3.12, of which this alone is missing in 3.11
        setattr(typing, "override", lambda method: method)  # noqa: B010
    shims.apply()
    _answers()


def without_triton() -> None:
    """0.16's TRITON_ALONE needs Triton, and is asked only whether its mode is on."""
    if importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType(TRITON_ALONE)

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return lambda *args, **kwargs: False

    setattr(stub, "__getattr__", attribute)  # noqa: B010
    sys.modules[TRITON_ALONE] = stub


def _compiled_helpers() -> None:
    """The index builder of the data sets, which a checkout would compile into its own folder: the wheel's, where one is installed."""
    for path in sys.path[1:]:
        for file in Path(path or ".", "megatron/core/datasets").glob("helpers_cpp*.so"):
            spec = importlib.util.spec_from_file_location(HELPERS, file)
            if spec is not None and spec.loader is not None:
                sys.modules[HELPERS] = module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return


class _Event(shims._Stream):
    """An event of a stream where everything has happened already (timers)."""

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _answers() -> None:
    """Devices, their properties (Blackwell's, so that no environment variable is asserted: arguments.py:927 of 0.16.1), memory, types."""
    cuda = torch.cuda
    properties = types.SimpleNamespace(major=10, minor=0, total_memory=MEMORY, multi_processor_count=1, name="cpu", gcnArchName="")
    answers: dict[str, Any] = {
        "device_count": 1, "set_device": None, "get_device_capability": (10, 0), "get_device_properties": properties,
        "get_device_name": "cpu", "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "device_memory_used": 0, "mem_get_info": (MEMORY, MEMORY), "empty_cache": None, "reset_peak_memory_stats": None,
        "ipc_collect": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(cuda, name, lambda *args, _value=value, **kwargs: _value)
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    cuda.Event = _Event
    for name, dtype in TENSOR_TYPES.items():
        setattr(cuda, f"{name}Tensor", lambda values=(), _dtype=dtype: torch.tensor(values, dtype=_dtype))
    for name in FACTORIES:
        setattr(torch, name, shims.on_cpu(getattr(torch, name)))


def start_without_cuda() -> None:
    """megatron.training without its question for CUDA and its compilers. Imports it."""
    import megatron.core.datasets.utils as datasets
    import megatron.training.initialize as start
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.T5 import t5_spec
    from megatron.training import training

    from orchestrator.workers import megatron_checkpoints

    initialise = training.initialize_megatron

    def without_cuda(*args: Any, **kwargs: Any) -> Any:
        return initialise(*args, **{**kwargs, "allow_no_cuda": True})

    training.initialize_megatron = without_cuda
    if hasattr(start, "fused_kernels"):
        start.fused_kernels.load = lambda args: None  # of Megatron's first years, compiled at start
    datasets.compile_helpers = lambda: None
    # A checkpoint's results go through a server process, which imports the program anew and lacks what is done here.
    megatron_checkpoints.keep_results_here()
    # Without Transformer Engine t5_spec.py leaves out the norm with which T5's blocks end.
    t5_spec.TENorm = t5_spec.LNImpl
    # pretrain_bert.py names it at its start, --spec local or not, and without Transformer Engine there is none.
    bert_layer_specs.bert_layer_with_transformer_engine_spec = None
