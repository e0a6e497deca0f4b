"""What models of megatron-core's layers under a DeepSpeed engine share: how they are built, tagged and exported."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from orchestrator.plan import Plan
from orchestrator.workers import hf_weights, megatron_groups, weights
from orchestrator.workers.deepspeed_trainer import DeepSpeedTrainer
from orchestrator.workers.groups import Groups
from orchestrator.workers.models import build_chunks, frees_sent_outputs, transformer_config

HEAD_NORMS = ("q_layernorm", "k_layernorm")


def sum_partial_gradients(model: torch.nn.Module) -> None:
    """Sums gradients over the tensor-parallel group where all its ranks hold a parameter whole but see a part: under sequence parallelism a
    part of the sequence (norms, row-parallel biases), and norms of queries and keys always their own heads. megatron-core does it in
    finalize_model_grads, which DeepSpeed never calls."""
    group = parallel_state.get_tensor_model_parallel_group()

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    for name, parameter in model.named_parameters():
        if getattr(parameter, "sequence_parallel", False) or any(norm in name for norm in HEAD_NORMS):
            parameter.register_hook(hook)


class MegatronLayersTrainer(DeepSpeedTrainer):
    """One rank: its stage of a megatron-core model, filled; what becomes of it is the subclass's."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        megatron_groups.prepare(plan)
        super().__init__(plan, engine, device)
        if plan.run.init_from:
            hf_weights.match_activation(engine, Path(plan.run.init_from))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.config = config = transformer_config(engine, stage, deallocate_pipeline_outputs=frees_sent_outputs(plan, device))
        (model,) = build_chunks(plan.model.stack, config, engine, plan.model.vocab_size)
        self.model = model = model.to(device)
        hf_weights.first_weights([model], config, plan)
        self.places = weights.places([model])
        self._tag()
        if plan.tp > 1:
            sum_partial_gradients(model)

    def _make_groups(self) -> Groups:
        return megatron_groups.initialise(self.plan)

    def _generator_states(self) -> dict[str, Any]:
        return megatron_groups.generator_states(self.device)

    def _set_generator_states(self, states: dict[str, Any]) -> None:
        megatron_groups.set_generator_states(states, self.device)

    def _tag(self) -> None:
        """Say which parameters are parts of a tensor and which are copies, so that DeepSpeed counts each once in the gradient norm."""
        for parameter in self.model.parameters():
            parameter.model_parallel = bool(getattr(parameter, "tensor_model_parallel", False))
            # The last stage's copy of a tied embedding (megatron-core: `shared`) is counted on the first.
            parameter.ds_pipe_replicated = bool(getattr(parameter, "shared", False))

    def _sum_tied_gradients(self) -> None:
        """Sums the gradients of the tied embedding's two copies, before the data-parallel reduction."""
        if self.plan.model.tie_embeddings and (self.model.pre_process or self.model.post_process):
            gradient = self._gradient(self.model.shared_embedding_or_output_weight())
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The tensor in which this optimizer adds up a parameter's gradient before the reduction (stage 1: stage_1_and_2.py:1247, or
        BF16_Optimizer's fp32 buffer)."""
        accumulated = getattr(parameter, "_hp_grad", None)
        if accumulated is not None:
            return accumulated
        return parameter.grad if self.plan.zero_stage == 0 else self.engine.optimizer.get_gradient_for_reduction(parameter)

    def export(self, folder: Path) -> None:
        """A Hugging Face checkpoint of the weights as they are. All ranks call this."""
        partitioned = self.plan.zero_stage == 3

        def gathered(parameter: torch.nn.Parameter) -> Any:
            return self.deepspeed.zero.GatheredParameters([parameter]) if partitioned else contextlib.nullcontext()

        hf_weights.export(self.places, self.plan, folder, self.engine_fields, gathered)
