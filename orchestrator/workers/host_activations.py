"""Activation checkpoints in host memory, by DeepSpeed's CheckpointHiddenStatesOffload (runtime/activation_checkpointing/
offload_activations.py): the hidden states that enter a checkpointed layer of transformers, copied to pinned memory on a stream of their own
beside forward, and back beside backward. On a CPU it takes nothing away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def checkpoints_on_host(model: torch.nn.Module) -> Any:
    """A context for one micro-batch's forward and backward pass of a model with non-reentrant checkpointing; to be entered again for the
    next. Raises RuntimeError on leaving where a layer's input was not taken.

    In two things DeepSpeed 0.19.8's own differs. It marks what a layer is called with, but transformers 5 checkpoints inside of the layer's
    hooks (modeling_layers.py), in which ZeRO-3 replaces the tensor: nothing would leave the GPU. Here it is marked there.
    And it keeps each checkpoint that has come back until the context is left, for a second backward pass over the same graph
    (_restore_tensor, cache=True): at backward's end all would be on the GPU again. Here each goes with its layer.
    """
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
    from transformers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    class CheckpointsOnHost(CheckpointHiddenStatesOffload):
        taken = 0

        def __enter__(self) -> Any:
            self.taken = 0
            return super().__enter__()

        def offload_input(self, tensor: torch.Tensor) -> int | None:
            self.taken += 1
            return super().offload_input(tensor)

        def _unpack_tensor(self, saved: Any) -> torch.Tensor:
            return saved if isinstance(saved, torch.Tensor) else self.restore_input(saved.tensor_id)

        def __exit__(self, *error: Any) -> Any:
            left = super().__exit__(*error)
            if error[0] is None and self.taken != len(layers):
                raise RuntimeError(f"offload_activations: the inputs of {self.taken} layers were taken, of {len(layers)}")
            return left

    checkpoints = CheckpointsOnHost(max_cpu_buffer_pool_count=len(layers))

    def marking(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def marked(forward: Callable[..., Any], *inputs: Any) -> Any:
            for hidden in inputs[:1]:
                checkpoints.mark(hidden)
            try:
                return checkpoint(forward, *inputs)
            finally:
                for hidden in inputs[:1]:
                    checkpoints._consume_mark(hidden)

        return marked

    for layer in layers:
        if layer.gradient_checkpointing:
            layer._gradient_checkpointing_func = marking(layer._gradient_checkpointing_func)
    return checkpoints
