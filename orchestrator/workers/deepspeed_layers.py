"""What models of megatron-core's layers under a DeepSpeed engine share: how they are built, tagged, stepped and exported."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import deepspeed_states, hf_weights, megatron_groups, weights
from orchestrator.workers.batch import Batch
from orchestrator.workers.models import built

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


def complete_groups(model: torch.nn.Module) -> None:
    """Gives a stage whose parameters all decay one that does not, a zero that nothing reads. Stage 1 asks the other stages of a pipeline
    for the norm once a group of parameters (stage_1_and_2.py:2951): a stage that has the embedding alone has nothing that doesn't decay,
    and the others would wait for it for ever."""
    if all(parameter.dim() > 1 for parameter in model.parameters()):
        like = next(model.parameters())
        model.register_parameter("group_filler", torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device)))


def require_no_auto(ds_config: Any, path: str = "ds_config") -> None:
    """Raises InputError for an "auto", which only the Hugging Face Trainer fills in."""
    if ds_config == "auto":
        raise InputError(path, "auto", "is filled in by the Hugging Face Trainer alone; DeepSpeed would take its own default")
    for name, value in ds_config.items() if isinstance(ds_config, dict) else ():
        require_no_auto(value, f"{path}.{name}")


class MegatronLayersTrainer(deepspeed_states.DeepSpeedStates):
    """One rank: its stage of a megatron-core model, filled; what becomes of it is the subclass's."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        self.plan, self.device, self.engine_fields = plan, device, engine
        megatron_groups.prepare(plan)
        self.deepspeed = deepspeed_states.join(plan, device)
        torch.manual_seed(plan.training.seed)
        self.groups = megatron_groups.initialise(plan)
        self.config, (self.model,), _ = built(plan, engine, device)
        self.places = weights.places([self.model])
        self._tag()
        if plan.tp > 1:
            sum_partial_gradients(self.model)

    def _initialise_engine(self, model: torch.nn.Module, mpu: Any) -> None:
        """Makes `engine` with this model."""
        if self.plan.pp > 1:
            complete_groups(model)
        groups, config = deepspeed_states.parameter_groups(model), self._ds_config(self.engine_fields["ds_config"])
        with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer, hpZ and the pipeline print their sizes
            self.engine, *_ = self.deepspeed.initialize(model=model, model_parameters=groups, mpu=mpu, config=config)
        self.take(self.engine)

    def _ds_config(self, ds_config: dict[str, Any]) -> dict[str, Any]:
        """The file's content, with what depends on this machine."""
        if "gradient_clipping" not in ds_config:
            raise InputError("ds_config.json", None, "has no gradient_clipping, and DeepSpeed would clip at 1.0")
        require_no_auto(ds_config)
        if not ds_config["gradient_clipping"] and self.plan.zero_stage == 0:
            ds_config = ds_config | {"gradient_clipping": deepspeed_states.UNCLIPPED}
        optimizer, params = ds_config["optimizer"], ds_config["optimizer"]["params"]
        if self.steps_when_built():
            params = params | {"lr": 0.0}
        if self.device.type == "cpu" and optimizer["type"].lower().startswith("adam"):
            # DeepSpeed's own Adam is compiled for the GPU, or for the CPU at first use; torch's is the same rule.
            params = {key: value for key, value in params.items() if key != "fused"} | {"torch_adam": True}
        return ds_config | {"optimizer": optimizer | {"params": params}}

    def _losses(self, batches: Sequence[Batch], *, forward_only: bool) -> list[torch.Tensor]:
        """The micro-batches' losses, on the last stage, after their backward passes; empty elsewhere."""
        raise NotImplementedError

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """The loss of a step's micro-batches; None on stages that have none."""
        losses = self._losses(batches, forward_only=False)
        return torch.stack(losses).mean() if losses else None

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        self.engine.eval()
        with torch.no_grad():
            losses = self._losses(batches, forward_only=True)
        self.engine.train()
        return torch.stack(losses).mean() if losses else None

    def update(self, lr: float) -> float | None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._apply()
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def _apply(self) -> None:
        """Does the optimizer's step, and clears the gradients."""
        self.engine.step()

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
