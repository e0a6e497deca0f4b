"""megatron-core's layers and groups under a DeepSpeed engine: ZeRO 0-3 without a pipeline; with one, megatron-core's 1F1B over ZeRO-1, or
DeepSpeed's PipelineModule over ZeRO 0 and 1 (deepspeed_pipeline.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist

from orchestrator.cpu import eager  # noqa: F401  # isort: skip  (before megatron-core)
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import loop
from orchestrator.workers.batch import Batch, mean_loss
from orchestrator.workers.deepspeed_layers import MegatronLayersTrainer
from orchestrator.workers.models import STACKS

ASKED: Final = (
    *("get_model_parallel_group", "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size"),
    *(f"get_tensor_model_parallel_{what}" for what in ("group", "rank", "world_size", "src_rank")),
)
"""What DeepSpeed 0.19.8 asks of an `mpu` (utils/groups.py, runtime/zero/stage_1_and_2.py:309, stage3.py:370, bf16_optimizer.py) that
megatron-core has by the same names. "Model parallel" is TP x PP here, so that gradient norm and overflow are those of the whole model, not
of one stage."""


def groups_for_deepspeed() -> SimpleNamespace:
    """megatron-core's groups as DeepSpeed asks for them."""
    model, data = parallel_state.get_model_parallel_group(), parallel_state.get_data_parallel_group()
    return SimpleNamespace(
        **{name: getattr(parallel_state, name) for name in ASKED},
        get_model_parallel_rank=lambda: dist.get_rank(model),
        get_model_parallel_world_size=lambda: dist.get_world_size(model),
        get_data_parallel_group_ranks=lambda: dist.get_process_group_ranks(data),
    )


class MegatronDeepSpeedTrainer(MegatronLayersTrainer):
    """One rank: its pipeline stage as a module of a DeepSpeed engine."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        super().__init__(plan, engine, device)
        config = self.config
        # Float16Module casts what enters the first stage and leaves the last, as under megatron-core's own optimizer.
        self.module = Float16Module(config, self.model) if config.bf16 or config.fp16 else self.model
        self._initialise_engine(self.module, groups_for_deepspeed())
        self.losses = STACKS[plan.model.stack].losses
        if plan.pp > 1:
            config.no_sync_func = contextlib.nullcontext
            config.finalize_model_grads_func = self._finalise
            self.schedule = get_forward_backward_func()

    def _ds_config(self, ds_config: dict[str, Any]) -> dict[str, Any]:
        ds_config = super()._ds_config(ds_config)
        if self.plan.pp > 1 and self.config.bf16:
            # BF16_Optimizer adds a micro-batch's gradient to its fp32 sum at the end of engine.backward (bf16_optimizer.py:503), which
            # megatron-core's schedule never calls: add it as soon as it is there, and drop it (bf16_optimizer.py:706).
            ds_config = ds_config | {"bf16": ds_config["bf16"] | {"immediate_grad_update": True}}
        return ds_config

    def _losses(self, batches: Sequence[Batch], *, forward_only: bool) -> list[torch.Tensor]:
        """The micro-batches' losses, on the last stage, after their backward passes. With a pipeline megatron-core's 1F1B calls autograd
        itself: no micro-batch is a boundary for DeepSpeed, so that gradients add up locally, and `_finalise` reduces them once."""
        if self.plan.pp > 1:
            if not forward_only:
                self.engine.set_gradient_accumulation_boundary(False)
            return self._scheduled(batches, forward_only=forward_only)
        logs = []
        for index, batch in enumerate(batches):
            loss = mean_loss(batch, self.losses(self.engine, batch))
            if not forward_only:
                self.engine.backward(loss)
                if index + 1 < len(batches):
                    self.engine.step()  # not a boundary: counts the micro-batch
            logs.append(loss.detach())
        return logs

    def _scheduled(self, batches: Sequence[Batch], *, forward_only: bool) -> list[torch.Tensor]:
        """The micro-batches' losses, on the last stage; empty elsewhere."""
        logs: list[torch.Tensor] = self.schedule(
            forward_step_func=self._forward_step,
            data_iterator=iter(batches),
            model=self.module,
            num_microbatches=len(batches),
            seq_length=self.plan.training.seq_length,
            micro_batch_size=self.plan.micro_batch_size,
            forward_only=forward_only,
        )
        return logs

    def _forward_step(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return self.losses(model, batch), partial(_loss_and_log, batch)

    def _finalise(self, *args: Any, **kwargs: Any) -> None:
        """Sums the gradients of the tied embedding's two copies, then reduces over data-parallel ranks, in place of
        finalize_model_grads."""
        self._sum_tied_gradients()
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()


def _loss_and_log(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """megatron-core's schedules divide the first by the number of micro-batches and collect the second."""
    loss = mean_loss(batch, losses)
    return loss, loss.detach().clone()


def build(plan: Plan, engine: dict[str, Any], device: torch.device) -> MegatronLayersTrainer:
    """The trainer of this rank; torch.distributed must be initialised. `engine` is the content of engine.json with "ds_config". Raises
    InputError for a plan that it can't run."""
    if plan.vpp > 1 or plan.cp > 1:
        raise InputError("pin.vpp" if plan.vpp > 1 else "pin.cp", max(plan.vpp, plan.cp), "this worker has neither vpp nor cp", ["1"])
    if plan.schedule == "deepspeed_1f1b":
        from orchestrator.workers.deepspeed_pipeline import PipelineTrainer

        return PipelineTrainer(plan, engine, device)
    if plan.pp > 1 and plan.zero_stage != 1:
        why = "a pipeline of megatron-core's runs over ZeRO-1; schedule=deepspeed_1f1b over ZeRO 0 and 1"
        raise InputError("pin.zero_stage", plan.zero_stage, why, ["1"])
    if plan.pp > 1 and plan.training.precision == "fp16":
        raise InputError(
            "train.precision", "fp16", "DeepSpeed scales the loss in engine.backward, which this pipeline never calls", ["bf16", "fp32"]
        )
    return MegatronDeepSpeedTrainer(plan, engine, device)


if __name__ == "__main__":
    loop.main(build)
