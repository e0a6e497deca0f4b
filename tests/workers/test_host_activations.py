"""Activation checkpoints in host memory: every layer's input goes there and comes back, and gradients are what they are without."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from architectures import CASES
from hf_cases import copying
from worker_plans import CPU

pytestmark = pytest.mark.engines

TRIED = ("llama", "qwen2", "qwen3", "gpt2", "phi3", "olmo2", "gemma3", "mixtral", "bert")
"""One of each class that the rule takes."""
FULL = ("qwen2", "phi3", "olmo2", "mixtral", "qwen3", "gemma3")


def built(name: str) -> torch.nn.Module:
    """With non-reentrant checkpointing."""
    import transformers

    fields = dict(CASES[name].fields)
    named = fields.get("architectures", [""])[0]
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    model = getattr(transformers, named)(config) if named else transformers.AutoModelForCausalLM.from_config(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def gradients(model: torch.nn.Module, around: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)  # dropout
    tokens = torch.arange(64).view(2, 32)
    with around:
        model(input_ids=tokens).logits.float().square().mean().backward()
        if hasattr(around, "stats"):
            assert not around._restored, "nothing that came back is kept once its layer is through"
            found = around.stats
            assert around.taken == found.offloaded_tensors + found.kept_last_tensors
            assert found.kept_last_tensors <= 1
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> None:
    from orchestrator.workers.deepspeed_states import import_deepspeed

    assert CPU.is_cpu
    import_deepspeed(torch.device("cpu"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) if name in FULL else name for name in TRIED])
def test_checkpoints_come_back_from_the_host(name: str) -> None:
    from orchestrator.workers.host_activations import checkpoints_on_host

    model = built(name)
    plain = gradients(model, contextlib.nullcontext())
    checkpoints = copying(checkpoints_on_host(model))
    for _ in range(2):  # the second micro-batch takes the first one's buffers
        assert all(map(torch.equal, gradients(model, checkpoints), plain))


def test_layers_that_are_not_checkpointed_are_an_error() -> None:
    from orchestrator.workers.host_activations import checkpoints_on_host

    model = built("llama")
    model.gradient_checkpointing_disable()
    with pytest.raises(RuntimeError, match="offload_activations: the inputs of 0 layers were taken, of 4"):
        gradients(model, checkpoints_on_host(model))
