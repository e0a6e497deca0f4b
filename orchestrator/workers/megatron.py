"""megatron-core alone: TP, PP, VPP, CP, sequence parallelism, plain or distributed optimizer (ZeRO-0, ZeRO-1)."""

from __future__ import annotations

import math
import queue
from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.cpu import eager  # noqa: F401  # isort: skip  (before megatron-core)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import context_parallel, loop, megatron_checkpoints, megatron_groups, models, optimizer_formats
from orchestrator.workers.batch import Batch
from orchestrator.workers.checkpoint import Saved, layout
from orchestrator.workers.distributed import generator_states, set_generator_states
from orchestrator.workers.routing_trace import RoutingTrace
from orchestrator.workers.saving import Snapshot
from orchestrator.workers.weights import routers_with_bias, sharded_state

T5_HEAD_BIAS = "lm_head.output_layer.bias"
"""A parameter as long as the padded vocabulary, which a checkpoint of another cluster may have padded otherwise: T5Model does not say of
it, as other models do, that it may be read into another length (t5_model.py, T5LMHead)."""

OWN_WRITER = {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
"""Keywords that ask for megatron-core's own asynchronous request: 0.19 makes one of nvidia-resiliency-ext, a package of its own, unless it
is told."""


class MegatronTrainer:
    """One rank: its model chunks under megatron-core's DDP, its schedule and optimizer."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        self.plan, self.device, self.engine_fields = plan, device, engine
        self.groups = megatron_groups.initialise(plan, engine["transformer_config"].get("hierarchical_context_parallel_sizes"))
        if plan.tp_comm_overlap:
            _make_user_buffers(plan)
        self.config, chunks, self.places = models.built(plan, engine, device)
        config = self.config
        if config.bf16 or config.fp16:
            biases = routers_with_bias(chunks)
            chunks = [Float16Module(config, chunk) for chunk in chunks]
            for router, bias in biases:
                # It stays fp32 (router.py, _maintain_float32_expert_bias), and was rounded here.
                router.expert_bias = bias
        # The loop looks at loss and norm, agreed by all ranks; this check would raise on some and leave the others waiting.
        ddp = DistributedDataParallelConfig(**engine["ddp"] | {"check_for_nan_in_grad": False})
        # Only the first chunk's gradients are cut into buckets: those of the others are ready before it, and overlap as a whole.
        self.chunks = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
        fields = models.with_types(OptimizerConfig, engine["optimizer"])
        # Without clipping the norm is still wanted: an infinite bound computes it and scales nothing.
        fields["clip_grad"] = fields["clip_grad"] or math.inf
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**fields), self.chunks, use_gloo_process_groups=False)
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            config.no_sync_func = self._one_or_all([chunk.no_sync for chunk in self.chunks])
            config.grad_sync_func = self._one_or_all([chunk.start_grad_sync for chunk in self.chunks])
        self.schedule = get_forward_backward_func()
        self.losses = models.STACKS[plan.model.stack].losses

    @staticmethod
    def _one_or_all(functions: list[Any]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    def _forward_step(self, batches: Iterator[Batch], chunk: torch.nn.Module, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        """What a chunk makes of the next micro-batch, and the function that makes the loss of it. `return_schedule_plan`: the pass cut into
        its layers, for Megatron to run beside another micro-batch's (overlap_moe_expert_parallel_comm,
        pipeline_parallel/combined_1f1b.py)."""
        batch = next(batches)
        # Supervised samples alone, which have a scale, are packed.
        bounds = context_parallel.sample_bounds(batch["positions"]) if "loss_scale" in batch else None
        batch = context_parallel.cut(batch, self.groups, bounds) | ({} if bounds is None else {"sample_bounds": bounds})
        made = models.schedule_plan(chunk, batch) if return_schedule_plan else self.losses(chunk, batch)
        return made, partial(context_parallel.loss_and_log, batch, groups=self.groups)

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._put_weights_into_gradients()
        return self._scheduled(batches, forward_only=False)

    def _put_weights_into_gradients(self) -> None:
        """The updated weights in the gradients' buffer, where that is what is gathered beside the forward pass: the optimizer leaves that
        to the loop (core/optimizer/optimizer.py:579, training/training.py:1632)."""
        ddp = self.chunks[0].ddp_config
        if ddp.reuse_grad_buf_for_mxfp8_param_ag and ddp.overlap_param_gather:
            for one in self.optimizer.chained_optimizers:
                one._copy_main_params_to_param_buffer()

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        overlapped = [chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]
        self._put_weights_into_gradients()
        for chunk in overlapped:
            # The gathers start each other in the order of the training's forward pass: here all weights are gathered first, as in
            # Megatron's own loop.
            chunk.disable_forward_pre_hook(param_sync=True)
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            loss = self._scheduled(batches, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()
        return loss

    def _scheduled(self, batches: Sequence[Batch], *, forward_only: bool) -> torch.Tensor | None:
        logs = self.schedule(
            forward_step_func=self._forward_step,
            data_iterator=_repeat(batches, len(self.chunks)),
            model=self._one_or_all(self.chunks),
            num_microbatches=len(batches),
            seq_length=self.plan.training.seq_length,
            micro_batch_size=self.plan.micro_batch_size,
            decoder_seq_length=self.plan.training.decoder_seq_length,
            forward_only=forward_only,
        )
        return torch.stack(logs).mean() if logs else None

    def update(self, lr: float) -> float | None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.plan.training.weight_decay * group.get("wd_mult", 1.0)
        _, grad_norm, _ = self.optimizer.step()
        return None if grad_norm is None else float(grad_norm)

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        """The state that a checkpoint holds, each tensor with its global place."""
        state: dict[str, Any] = {f"model{index}": sharded_state(models.bare(chunk)) for index, chunk in enumerate(self.chunks)}
        for base in nested_values(state):
            if isinstance(base, ShardedTensor) and base.key == T5_HEAD_BIAS:
                base.allow_shape_mismatch = True
        state["optimizer"] = self.optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=dict(optimizer_formats.FORMAT))
        return state

    def _generators(self) -> ShardedObject:
        """States of the random generators, one set for each rank."""
        states = generator_states(self.device)
        return ShardedObject("generators", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)

    def trace_routing(self, out: Path, first_step: int) -> RoutingTrace:
        """Begins a trace of the routing of all steps from now on. All ranks call this."""
        return RoutingTrace(self.chunks, out, first_step)

    def snapshot(self, folder: Path, step: int) -> Snapshot:
        """A checkpoint by megatron-core's own asynchronous request, written by this process. megatron-core would write by processes that it
        forks, which NCCL's and gloo's threads don't survive, and wait for ever for one that is killed (an out-of-memory killer takes them
        first); the result goes through a server process of its own (dist_checkpointing/strategies/filesystem_async.py:51), which nobody
        needs here."""
        megatron_checkpoints.gather_weights(self.chunks)
        megatron_checkpoints.keep_results_here()
        state = self._state(is_loading=False) | {"step": step, "generators": self._generators()}
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
        request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True, **OWN_WRITER)
        buckets: list[Any] = []
        if request.async_fn is not None:
            for path, key, (raw, tensors) in request.async_fn_args[1]:
                buckets.append((path, key, (raw, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors])))

        def write() -> None:
            results = {}
            for number, bucket in enumerate(buckets):
                answers: queue.Queue[Any] = queue.Queue()
                count: queue.Queue[int] = queue.Queue()
                count.put(number)
                FileSystemWriterAsync.write_preloaded_data(request.async_fn.args[0], number, bucket, answers, count, True)
                _, results[number] = answers.get()
                if isinstance(results[number], Exception):
                    raise results[number]
            if buckets:
                request.async_fn_args[2].put(results)

        def finish() -> None:
            for function in request.finalize_fns:
                function()

        return Snapshot(write=write, finish=finish)

    def export(self, folder: Path) -> None:
        """A Hugging Face checkpoint of the weights as they are. All ranks call this."""
        megatron_checkpoints.export(self.chunks, self.places, self.plan, self.engine_fields, folder)

    def load(self, saved: Saved) -> None:
        """Loads a checkpoint of any layout of this engine, the generators only in the same one."""
        megatron_checkpoints.prepare(self.optimizer)
        state = self._state(is_loading=True)
        same = saved.layout == layout(self.plan)
        other_kind = (saved.layout["zero_stage"] == 0) != (self.plan.zero_stage == 0)
        if other_kind:
            optimizer_formats.ask(state["optimizer"], self.optimizer)
        if same:
            state["generators"] = self._generators()
        state = dist_checkpointing.load(state, str(saved.folder))
        for index, chunk in enumerate(self.chunks):
            models.bare(chunk).load_state_dict(state[f"model{index}"], strict=False)
        self.optimizer.load_state_dict(optimizer_formats.read(state["optimizer"], self.optimizer))
        megatron_checkpoints.count_steps_apart(self.optimizer)
        if same:
            set_generator_states(state["generators"], self.device)


def _repeat(batches: Sequence[Batch], chunks: int) -> Iterator[Batch] | list[Iterator[Batch]]:
    """The batches as megatron-core's schedules take them: one iterator a chunk."""
    return iter(batches) if chunks == 1 else [iter(batches) for _ in range(chunks)]


def _make_user_buffers(plan: Plan) -> None:
    """Transformer Engine's buffers for tensor-parallel traffic beside products, as Megatron's own programs make them
    (training/initialize.py, _initialize_tp_communicators)."""
    from megatron.core.utils import is_te_min_version
    from transformer_engine.pytorch.module import base

    fp8 = plan.training.precision == "fp8"
    tokens = plan.training.seq_length * plan.micro_batch_size // plan.cp
    if is_te_min_version("2.7.0"):
        modes = base.UserBufferQuantizationMode
        how: dict[str, Any] = {"quantization_modes": [modes.FP8 if fp8 else modes.NONE]}
    else:
        how = {"use_fp8": fp8}
    base.initialize_ub(shape=[tokens, plan.model.hidden_size], tp_size=plan.tp, bootstrap_backend="nccl", **how)


def build(plan: Plan, engine: dict[str, Any], device: torch.device) -> MegatronTrainer:
    """The trainer of this rank; torch.distributed must be initialised. `engine` is the content of engine.json. Raises InputError for
    Megatron-FSDP."""
    if plan.megatron_fsdp:
        raise InputError("pin.megatron_fsdp", "true", "this worker has no Megatron-FSDP: start Megatron's own program with entry=")
    return MegatronTrainer(plan, engine, device)


if __name__ == "__main__":
    loop.main(build)
