"""megatron-core's layers in DeepSpeed's PipelineModule: its own 1F1B over ZeRO 0 and 1, stages and recompute as the plan has them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.schedule import BackwardPass, OptimizerStep, PipeInstruction, ReduceGrads, ReduceTiedGrads, TrainSchedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state

from orchestrator.plan import Plan
from orchestrator.workers import pipeline_layers
from orchestrator.workers.batch import Batch
from orchestrator.workers.deepspeed_layers import MegatronLayersTrainer


class Passes(TrainSchedule):
    """DeepSpeed's schedule up to the last pass; reduction and update are ours to start. Between two steps the last stage lets go of the
    logits that it is through with, which DeepSpeed keeps until their buffer's next turn (runtime/pipe/engine.py:731)."""

    def __init__(self, engine: Any, micro_batches: int) -> None:
        super().__init__(micro_batches=micro_batches, stages=engine.num_stages, stage_id=engine.stage_id)
        self.engine = engine

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, ReduceTiedGrads | ReduceGrads | OptimizerStep)]
            if self.engine.is_last_stage():
                for command in commands:
                    if isinstance(command, BackwardPass):
                        self.engine.pipe_buffers["outputs"][command.buffer_id] = None


class PipelineTrainer(MegatronLayersTrainer):
    """One rank: the layers of its stage under DeepSpeed's PipelineEngine."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        super().__init__(plan, engine, device)
        # Its order, data between pipe and model, is megatron-core's.
        topology = PipeModelDataParallelTopology(num_pp=plan.pp, num_mp=plan.tp, num_dp=plan.dp)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        with contextlib.redirect_stdout(io.StringIO()):
            module = pipeline_layers.pipeline(self.model, plan.model.stack, engine["pipeline"], topology, stage)
        self._tag()
        self._initialise_engine(module, None)
        self.inputs = pipeline_layers.STACKS[plan.model.stack].inputs

    def _microbatches(self, batches: Sequence[Batch]) -> Iterator[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
        return iter([(self.inputs(batch), pipeline_layers.target(batch)) for batch in batches])

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """The loss of a step's micro-batches on the last stage, None elsewhere; does what `train_batch` does before its optimizer step."""
        engine = self.engine
        engine.set_dataiterator(self._microbatches(batches))
        engine.module.train()
        engine.total_loss, engine.total_additional_losses, engine._compute_loss = None, None, True
        engine._exec_schedule(Passes(engine, len(batches)))
        # Not DeepSpeed's own, which adds up `weight.grad` wherever the optimizer keeps its sums (runtime/pipe/engine.py:281).
        self._sum_tied_gradients()
        engine._exec_reduce_grads()
        return engine.total_loss / len(batches) if engine.is_last_stage() else None

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        loss = self.engine.eval_batch(self._microbatches(batches), num_micro_batches=len(batches))
        self.engine.module.train()
        return loss if self.engine.is_last_stage() else None

    def _apply(self) -> None:
        self.engine._exec_optimizer_step()
