"""What torch's AdamW allocates in a step, which Megatron-core takes where there are no fused optimizers."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from cost_cases import a100, candidate, cost_model
from msgspec.structs import replace

from orchestrator.engines import ENGINES
from orchestrator.hardware.catalog import GPUS
from orchestrator.hardware.spec import Software

BARE = Software(transformer_engine=False, flash_attention=False, apex=False)


def step_bytes(software: Software, engine: str = "megatron", gpu: str = "A100-SXM-80GB", **training: Any) -> float:
    cluster = replace(a100(8), software=software, gpu=GPUS[gpu])
    model = cost_model(cluster=cluster, traits=ENGINES[engine].traits(software), **training)
    layer = model.layer(candidate(zero_stage=1), "decoder", "none")
    return layer.step_bytes / layer.parameters


def test_it_is_priced_where_neither_transformer_engine_nor_apex_is_there() -> None:
    assert step_bytes(BARE) == step_bytes(BARE, precision="fp32") == 4
    assert step_bytes(BARE, grad_reduce_dtype="bf16", grad_accum_dtype="bf16") == 4 + 4, "beside the fp32 copy of the gradients"
    assert step_bytes(replace(BARE, apex=True)) == step_bytes(Software()) == step_bytes(BARE, optimizer="sgd") == 0
    assert step_bytes(BARE, gpu="cpu", precision="fp32") == 0, "where torch goes from parameter to parameter"
    assert step_bytes(BARE, "deepspeed") == step_bytes(Software(), "deepspeed"), "which has a fused one of its own"


@pytest.mark.engines
def test_it_is_what_torchs_own_step_allocates() -> None:
    """Of tensors without memory on a GPU that need not be there; no optimizer but torch's is installed here."""
    import torch
    from megatron.core import optimizer
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    live: dict[int, int] = {}
    most = [0]

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = call(*args, **(kwargs or {}))
            for storage in (tensor.untyped_storage() for tensor in tree_leaves(made) if isinstance(tensor, torch.Tensor)):
                if id(storage) not in live:
                    live[id(storage)] = storage.nbytes()
                    weakref.finalize(storage, live.pop, id(storage), None)
            most[0] = max(most[0], sum(live.values()))
            return made

    assert optimizer.USING_PYTORCH_OPTIMIZER
    assert optimizer.Adam is torch.optim.AdamW
    assert "cuda" in _get_foreach_kernels_supported_devices(), "all parameters at once is the default on such a device"
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(1000, 1000, device="cuda")) for _ in range(5)]
        adam = optimizer.Adam(parameters, lr=1e-3, weight_decay=0.1, foreach=True)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        adam.step()  # makes the moments
        with Counted():
            adam.step()
    assert most[0] == ENGINES["megatron"].traits(BARE).adam_step * 5_000_000
