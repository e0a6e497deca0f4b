"""One of Megatron-LM's own programs, trained on CPU ranks with gloo: a copy of this file under the program's name is started in its place.

    MEGATRON_LM=CHECKOUT torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2 ...

Only what asks torch.cuda for a GPU is answered otherwise; no arithmetic is changed. Two things are chosen that training does not fix: the
first weights are those of our workers (orchestrator/workers/weights.py), which depend on the seed and not on the layout, and a stage keeps
what it has sent (gloo still reads it). T5's blocks end with the norm that its layers have: without Transformer Engine
megatron/core/models/T5/t5_spec.py leaves that last norm out.

SAMPLES=FILE.npz, for pretrain_bert.py and pretrain_t5.py, which mask and corrupt by rules of their own: the i-th sample that their dataset
gives is the i-th row of each array in the file, by the names that the dataset's own samples have.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any


def checkout_first(checkout: str) -> None:
    """Import the checkout's megatron.core, not the wheel's, and not this file in the place of the checkout's program."""
    here = Path(__file__).parent.resolve()
    sys.path = [checkout, *(path for path in sys.path if Path(path or ".").resolve() != here)]


def without_triton() -> None:
    """core/transformer/custom_layers/batch_invariant_kernels.py needs Triton, and is asked only whether its mode is on."""
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    stub = types.ModuleType(name)

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return lambda *args, **kwargs: False

    stub.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = stub


def compiled_helpers() -> None:
    """The index builder of the datasets, which a checkout would compile into its own folder: the wheel's."""
    name = "megatron.core.datasets.helpers_cpp"
    for path in sys.path[1:]:
        for file in Path(path or ".", "megatron/core/datasets").glob("helpers_cpp*.so"):
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return


def answer_for_cuda() -> None:
    """What megatron/training asks of torch.cuda beside megatron.core: devices, properties (Blackwell's, so that no environment variable is
    asserted), memory, tensor types."""
    import torch

    from orchestrator.workers import cpu_shims

    class Event(cpu_shims._Stream):
        """Of a stream where everything has happened already (timers)."""

        def elapsed_time(self, other: Any) -> float:
            return 0.0

    torch.set_num_threads(1)
    cpu_shims.apply()
    cuda = torch.cuda
    properties = types.SimpleNamespace(major=10, minor=0, total_memory=4 << 30, multi_processor_count=1, name="cpu", gcnArchName="")
    answers = {
        "device_count": 1, "set_device": None, "get_device_capability": (10, 0), "get_device_properties": properties,
        "get_device_name": "cpu", "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "device_memory_used": 0, "mem_get_info": (4 << 30, 4 << 30), "empty_cache": None, "reset_peak_memory_stats": None,
        "ipc_collect": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(cuda, name, lambda *args, _value=value, **kwargs: _value)
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    cuda.Event = Event
    types_of = {"Float": torch.float32, "Long": torch.int64, "Int": torch.int32, "Double": torch.float64, "Byte": torch.uint8}
    for name, dtype in types_of.items():
        setattr(cuda, f"{name}Tensor", lambda values=(), _dtype=dtype: torch.tensor(values, dtype=_dtype))

    def on_cpu(factory: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return factory(*args, **kwargs)

        return call

    for name in ("rand", "randn", "randint", "rand_like", "ones_like", "full_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def prepare_training() -> None:
    """megatron.training without its question for CUDA, its compilers, and with the first weights of our workers."""
    import megatron.core.datasets.utils as datasets
    import megatron.training.initialize as start
    from megatron.core.models.bert import bert_layer_specs
    from megatron.core.models.T5 import t5_spec
    from megatron.training import get_args, training

    initialise, get_model = training.initialize_megatron, training.get_model

    def without_cuda(*args: Any, **kwargs: Any) -> Any:
        return initialise(*args, **{**kwargs, "allow_no_cuda": True})

    def with_our_weights(provider: Any, *args: Any, **kwargs: Any) -> Any:
        from orchestrator.workers import weights

        def filled(*inner: Any, **more: Any) -> Any:
            model = provider(*inner, **more)
            weights.initialise([model], model.config, get_args().seed)
            model.config.deallocate_pipeline_outputs = False
            return model

        return get_model(filled, *args, **kwargs)

    t5_spec.TENorm = t5_spec.LNImpl
    # pretrain_bert.py names it at its start, --spec local or not, and without Transformer Engine there is none.
    bert_layer_specs.bert_layer_with_transformer_engine_spec = None
    training.initialize_megatron = without_cuda
    training.get_model = with_our_weights
    start.fused_kernels.load = lambda args: None  # of Megatron's first years, compiled at start
    datasets.compile_helpers = lambda: None


def given_samples(file: str) -> None:
    """The datasets of BERT and T5 give these samples; what decides how many there are, and in which order they are asked for, is theirs."""
    import numpy as np
    from megatron.core.datasets import bert_dataset, t5_dataset

    arrays = dict(np.load(file))

    def sample(self: Any, index: int) -> dict[str, Any]:
        return {name: rows[index] for name, rows in arrays.items()}

    bert_dataset.BERTMaskedWordPieceDataset.__getitem__ = sample
    t5_dataset.T5MaskedWordPieceDataset.__getitem__ = sample


def main() -> None:
    checkout = os.environ["MEGATRON_LM"]
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    checkout_first(checkout)
    without_triton()
    compiled_helpers()
    answer_for_cuda()
    import megatron.core

    assert megatron.core.__file__.startswith(checkout), megatron.core.__file__
    prepare_training()
    if "SAMPLES" in os.environ:
        given_samples(os.environ["SAMPLES"])
    sys.argv[0] = f"{checkout}/{Path(__file__).name}"
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
