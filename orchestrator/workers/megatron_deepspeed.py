"""megatron-core's layers and groups under a DeepSpeed engine: ZeRO 0-3 without a pipeline, megatron-core's 1F1B over ZeRO-1 with one."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import hf_weights, loop, parts
from orchestrator.workers.checkpoint import Saved, layout
from orchestrator.workers.distributed import generator_states, initialise_groups, set_generator_states
from orchestrator.workers.models import FAMILIES, Batch, build_chunks, frees_sent_outputs, mean_loss, transformer_config

TAG = "state"
"""DeepSpeed's name for the folder inside a checkpoint."""


class Groups:
    """What DeepSpeed 0.19.8 asks of an `mpu` (utils/groups.py, runtime/zero/stage_1_and_2.py:309, stage3.py:370, bf16_optimizer.py).

    "Model parallel" is TP x PP here, so that gradient norm and overflow are those of the whole model, not of one stage.
    """

    get_model_parallel_group = staticmethod(parallel_state.get_model_parallel_group)
    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_tensor_model_parallel_src_rank = staticmethod(parallel_state.get_tensor_model_parallel_src_rank)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)

    @staticmethod
    def get_model_parallel_rank() -> int:
        return dist.get_rank(parallel_state.get_model_parallel_group())

    @staticmethod
    def get_model_parallel_world_size() -> int:
        return dist.get_world_size(parallel_state.get_model_parallel_group())

    @staticmethod
    def get_data_parallel_group_ranks() -> list[int]:
        return dist.get_process_group_ranks(parallel_state.get_data_parallel_group())


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, made ready for this device before it looks at the machine itself."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    if device.type == "cpu":
        # Otherwise init_distributed compiles a shared-memory all-reduce, for a minute (comm/torch.py); gloo does the same.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def set_log_level(plan: Plan) -> None:
    """DeepSpeed's own reports (ds.steps_per_print, ds.wall_clock_breakdown) go to the log of whoever asks for something of DeepSpeed."""
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("info" if plan.extra.get("ds") else "error")


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """As megatron-core groups them: biases and norms (one dimension) don't decay (optimizer/__init__.py:69)."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    free = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed}, {"params": free, "weight_decay": 0.0}]


def tag_parameters(model: torch.nn.Module) -> None:
    """Say which parameters are parts of a tensor and which are copies, so that DeepSpeed counts each once in the gradient norm."""
    for parameter in model.parameters():
        parameter.model_parallel = bool(getattr(parameter, "tensor_model_parallel", False))
        # The last stage's copy of a tied embedding (megatron-core: `shared`) is counted on the first.
        parameter.ds_pipe_replicated = bool(getattr(parameter, "shared", False))


def sum_sequence_parallel_gradients(model: torch.nn.Module) -> None:
    """Under sequence parallelism each tensor-parallel rank sees a part of the sequence: gradients of what all ranks hold whole (norms,
    row-parallel biases) must be summed over the group. megatron-core does it in finalize_model_grads, which DeepSpeed never calls."""
    group = parallel_state.get_tensor_model_parallel_group()

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(hook)


class MegatronDeepSpeedTrainer:
    """One rank: its pipeline stage as a module of a DeepSpeed engine."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        self.plan, self.device, self.engine_fields = plan, device, engine
        if plan.run.init_from:
            hf_weights.match_activation(engine, Path(plan.run.init_from))
        deepspeed = import_deepspeed(device)
        set_log_level(plan)
        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
        initialise_groups(plan)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.config = config = transformer_config(engine, stage, deallocate_pipeline_outputs=frees_sent_outputs(plan, device))
        (model,) = build_chunks(plan.model.family, config, engine, plan.model.vocab_size)
        self.model = model = model.to(device)
        hf_weights.first_weights([model], config, plan)
        self.places = parts.places([model])
        tag_parameters(model)
        if plan.sequence_parallel:
            sum_sequence_parallel_gradients(model)
        # Float16Module casts what enters the first stage and leaves the last, as under megatron-core's own optimizer.
        self.module = Float16Module(config, model) if config.bf16 or config.fp16 else model
        # BF16_Optimizer prints its memory, stage after stage.
        with contextlib.redirect_stdout(io.StringIO()):
            self.engine, *_ = deepspeed.initialize(
                model=self.module,
                model_parameters=parameter_groups(self.module),
                mpu=Groups(),
                config=self._ds_config(engine["ds_config"]),
            )
        if self._steps_when_built():
            self.engine.optimizer.optimizer.state.clear()
        self.losses = FAMILIES[plan.model.family].losses
        if plan.pp > 1:
            config.no_sync_func = contextlib.nullcontext
            config.finalize_model_grads_func = self._finalise
            self.schedule = get_forward_backward_func()

    def _steps_when_built(self) -> bool:
        """At stage 0 in bf16 or fp16 DeepSpeed allocates Adam's state by a step with gradients of zero (initialize_optimizer_states in
        fp16/unfused_optimizer.py and fused_optimizer.py:125): it decays the weights once, and Adam's bias correction is one step ahead for
        ever. We give that step no learning rate, and forget its count."""
        return self.plan.zero_stage == 0 and self.plan.training.precision != "fp32"

    def _ds_config(self, ds_config: dict[str, Any]) -> dict[str, Any]:
        """The file's content, with what depends on this machine."""
        if "gradient_clipping" not in ds_config:
            raise InputError("ds_config.json", None, "has no gradient_clipping, and DeepSpeed would clip at 1.0")
        if not ds_config["gradient_clipping"] and self.plan.zero_stage == 0:
            # Stage 0 computes no norm unless it clips.
            ds_config = ds_config | {"gradient_clipping": 1e30}
        if self._steps_when_built():
            optimizer = ds_config["optimizer"]
            ds_config = ds_config | {"optimizer": optimizer | {"params": optimizer["params"] | {"lr": 0.0}}}
        if self.plan.pp > 1 and self.config.bf16:
            # BF16_Optimizer adds a micro-batch's gradient to its fp32 sum at the end of engine.backward (bf16_optimizer.py:503), which
            # megatron-core's schedule never calls: add it as soon as it is there, and drop it (bf16_optimizer.py:706).
            ds_config = ds_config | {"bf16": ds_config["bf16"] | {"immediate_grad_update": True}}
        if self.device.type == "cpu":
            optimizer = ds_config["optimizer"]
            if optimizer["type"].lower().startswith("adam"):
                # DeepSpeed's own Adam is compiled for the GPU, or for the CPU at first use; torch's is the same rule.
                params = {key: value for key, value in optimizer["params"].items() if key != "fused"} | {"torch_adam": True}
                ds_config = ds_config | {"optimizer": optimizer | {"params": params}}
        return ds_config

    def _forward_step(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return self.losses(model, batch), partial(_loss_and_log, batch)

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        if self.plan.pp > 1:
            return self._pipeline(batches)
        logs = []
        for index, batch in enumerate(batches):
            loss = self._loss(batch)
            self.engine.backward(loss)
            logs.append(loss.detach())
            if index + 1 < len(batches):
                # Not a boundary: counts the micro-batch.
                self.engine.step()
        return torch.stack(logs).mean()

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Of one micro-batch, without a pipeline."""
        return mean_loss(batch, self.losses(self.engine, batch))

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        self.engine.eval()
        with torch.no_grad():
            logs = self._scheduled(batches, forward_only=True) if self.plan.pp > 1 else [self._loss(batch) for batch in batches]
        self.engine.train()
        return torch.stack(logs).mean() if logs else None

    def _pipeline(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """megatron-core's 1F1B calls autograd itself. No micro-batch is a boundary for DeepSpeed, so that gradients add up locally;
        `_finalise` reduces them once."""
        self.engine.set_gradient_accumulation_boundary(False)
        logs = self._scheduled(batches, forward_only=False)
        return torch.stack(logs).mean() if logs else None

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

    def _finalise(self, *args: Any, **kwargs: Any) -> None:
        """In place of finalize_model_grads: the tied embedding's two copies, then the data-parallel reduction."""
        if self.plan.model.tie_embeddings and parallel_state.is_rank_in_embedding_group():
            gradient = self._gradient(self.model.shared_embedding_or_output_weight())
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Where this optimizer adds up a parameter's gradient before the reduction (stage 1: stage_1_and_2.py:1247, or BF16_Optimizer's
        fp32 buffer)."""
        accumulated = getattr(parameter, "_hp_grad", None)
        return accumulated if accumulated is not None else self.engine.optimizer.get_gradient_for_reduction(parameter)

    def update(self, lr: float) -> float | None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        grad_norm = self._plain_norm() if self.plan.zero_stage == 0 and self.plan.training.precision == "fp32" else None
        self.engine.step()
        if grad_norm is None:
            grad_norm = self.engine.get_global_grad_norm()
        return None if grad_norm is None else float(grad_norm)

    def _plain_norm(self) -> float:
        """The global gradient norm at stage 0 in fp32, which DeepSpeed clips by but doesn't tell. Parts of a tensor count on every rank,
        copies once."""
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        counted = [p.grad for p in self.model.parameters() if p.grad is not None and (first or p.model_parallel)]
        square = sum((gradient.double().square().sum() for gradient in counted), torch.zeros((), dtype=torch.float64, device=self.device))
        dist.all_reduce(square, group=parallel_state.get_model_parallel_group())
        return math.sqrt(float(square))

    def save(self, folder: Path, step: int) -> None:
        """By places in the whole model where that covers this plan; else as DeepSpeed does, for this layout only."""
        from orchestrator.workers import states

        if not states.covers(self.plan):
            self.engine.save_checkpoint(str(folder), tag=TAG, client_state={"step": step}, save_latest=False)
            return
        if dist.get_rank() == 0:
            (folder / states.FOLDER).mkdir()
        dist.barrier()
        states.save(self.engine, self.places, self.plan, folder / states.FOLDER)
        torch.save(generator_states(self.device), folder / f"generators-{dist.get_rank():06d}.pt")

    def export(self, folder: Path) -> None:
        """A Hugging Face checkpoint of the weights as they are. All ranks call this."""
        import deepspeed

        partitioned = self.plan.zero_stage == 3

        def gathered(parameter: torch.nn.Parameter) -> Any:
            return deepspeed.zero.GatheredParameters([parameter]) if partitioned else contextlib.nullcontext()

        hf_weights.export(self.places, self.plan, folder, self.engine_fields, gathered)

    def load(self, saved: Saved) -> None:
        """Any layout, but for plans whose checkpoints are DeepSpeed's own (`save`); the generators only in the same. Raises InputError."""
        from orchestrator.workers import states

        mine = layout(self.plan)
        if saved.layout["engine"] != self.plan.engine:
            raise InputError("train.resume", saved.folder, f"was written by engine={saved.layout['engine']}, not {self.plan.engine}")
        if (saved.folder / states.FOLDER).is_dir() and states.covers(self.plan):
            states.load(self.engine, self.places, self.plan, saved.folder / states.FOLDER, saved.step)
            if saved.layout == mine:
                path = saved.folder / f"generators-{dist.get_rank():06d}.pt"
                set_generator_states(torch.load(path, weights_only=False), self.device)
            return
        if saved.layout != mine:
            different = ", ".join(f"{key}={saved.layout.get(key)} (now {mine[key]})" for key in mine if saved.layout.get(key) != mine[key])
            why = f"was written with {different}; stage 0 in 16 bits, fp16 and sgd continue in the same layout only"
            raise InputError("train.resume", saved.folder, why)
        path, _ = self.engine.load_checkpoint(str(saved.folder), tag=TAG)
        if path is None:
            raise InputError("train.resume", saved.folder, "holds nothing that DeepSpeed can load")


def _loss_and_log(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """megatron-core's schedules divide the first by the number of micro-batches and collect the second."""
    loss = mean_loss(batch, losses)
    return loss, loss.detach().clone()


def build(plan: Plan, engine: dict[str, Any], device: torch.device) -> MegatronDeepSpeedTrainer:
    """This rank's trainer; torch.distributed must be initialised. `engine` is the content of engine.json with "ds_config"."""
    if plan.pp > 1 and plan.zero_stage != 1:
        raise InputError("pin.zero_stage", plan.zero_stage, "a pipeline under DeepSpeed runs over ZeRO-1", ["1"])
    if plan.pp > 1 and plan.training.precision == "fp16":
        raise InputError(
            "train.precision", "fp16", "DeepSpeed scales the loss in engine.backward, which the pipeline never calls", ["bf16", "fp32"]
        )
    if plan.vpp > 1 or plan.cp > 1:
        raise InputError("pin.vpp" if plan.vpp > 1 else "pin.cp", max(plan.vpp, plan.cp), "this worker has neither vpp nor cp", ["1"])
    return MegatronDeepSpeedTrainer(plan, engine, device)


if __name__ == "__main__":
    loop.main(build)
