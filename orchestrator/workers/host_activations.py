"""Activation checkpoints in host memory, by DeepSpeed's CheckpointHiddenStatesOffload (runtime/activation_checkpointing/
offload_activations.py): the hidden states that enter a checkpointed layer of transformers, copied to pinned memory on a stream of their own
beside forward, and back beside backward. On a CPU it takes nothing away."""

from __future__ import annotations

from typing import Any

import torch


def checkpoints_on_host(model: torch.nn.Module) -> Any:
    """A context for one micro-batch's forward and backward pass of a model with non-reentrant checkpointing; to be entered again for the
    next. Raises RuntimeError on leaving where a layer's input was not seen.

    DeepSpeed's own keeps each checkpoint that has come back until the context is left, for a second backward pass over the same graph
    (_restore_tensor, cache=True): at backward's end all would be on the GPU again. Here each goes with its layer.
    """
    from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
    from transformers import GradientCheckpointingLayer

    layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())

    class CheckpointsOnHost(CheckpointHiddenStatesOffload):
        def _unpack_tensor(self, saved: Any) -> torch.Tensor:
            return saved if isinstance(saved, torch.Tensor) else self.restore_input(saved.tensor_id)

        def __exit__(self, *error: Any) -> Any:
            seen = self.stats.marked_tensors
            left = super().__exit__(*error)
            if error[0] is None and seen != layers:
                raise RuntimeError(f"offload_activations: the inputs of {seen} layers were seen, of {layers}")
            return left

    return CheckpointsOnHost(max_cpu_buffer_pool_count=layers)
