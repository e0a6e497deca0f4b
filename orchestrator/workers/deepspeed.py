"""Hugging Face models under a DeepSpeed engine: ZeRO 0 to 3, AutoTP, Ulysses, hpZ, optimizer offload, gradient checkpointing."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import auto_ep, hf_checkpoint, host_activations, hugging_face, loop, lora, tiles
from orchestrator.workers.batch import Batch, mean_loss
from orchestrator.workers.traced import TracedTrainer


def whole_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: getattr(parameter, "ds_shape", parameter.shape) for name, parameter in model.named_parameters()}


def tag_sliced_parameters(model: torch.nn.Module, before: dict[str, torch.Size]) -> None:
    """AutoTP tags the weights of the linears that it cuts, but not T5's relative bias, of which each rank gets its heads: the gradient
    norm would count those of rank 0 only. `before`: the shapes before AutoTP."""
    for name, shape in whole_shapes(model).items():
        if shape != before[name]:
            model.get_parameter(name).tensor_model_parallel = True


def summed_over_sequence(plan: Plan) -> int:
    """How many ranks' gradients DeepSpeed adds up where it should take their mean. Under Ulysses it divides by the data-parallel ranks
    alone, not by those of a sequence (stage_1_and_2.py:1508, engine.py:3884), but at stage 3 by all (reduce_scatter_coalesced, called at
    stage3.py:1931). Adam hides the factor, clipping does not."""
    return plan.cp if plan.zero_stage < 3 else 1


class HuggingFaceTrainer(hf_checkpoint.HuggingFaceStates):
    """One rank: a Hugging Face model as the module of a DeepSpeed engine. DeepSpeed makes groups of its own, neighbours first: the
    same as those of the plan's order."""

    balance: torch.Tensor | None = None
    """The last micro-batch's loss of balance, times what it counts."""
    logits: torch.Tensor | None = None
    """The last micro-batch's logits; None under tiles."""
    tiled_head: tiles.TiledHead | None = None
    host_activations: Any = None

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        super().__init__(plan, engine, device)
        # hpZ prints its sizes.
        with contextlib.redirect_stdout(io.StringIO()):
            self.model = hugging_face.first_model(plan, engine, device)
        with self.corrected():
            self._initialise_engine(self.model, self._ulysses(engine["model"]) if plan.cp > 1 else None)

    @contextlib.contextmanager
    def corrected(self) -> Iterator[None]:
        """Around DeepSpeed's initialisation of `model`: mends what it would do otherwise than the plan, and adds what the plan asks of its
        functions. What AutoTP cuts counts on every rank in the gradient norm, buffers stay in the type that they were made in."""
        plan, model = self.plan, self.model
        whole, buffers = whole_shapes(model), hugging_face.float_buffers(model)
        if plan.ep > 1:
            auto_ep.prepare(model)
        with lora.seen_into() if plan.tp > 1 and plan.training.lora is not None else contextlib.nullcontext():
            yield
        if plan.tp > 1:
            tag_sliced_parameters(model, whole)
        if plan.ep > 1:
            auto_ep.require_layers(model, plan)
        hugging_face.restore(model, buffers)
        if plan.tiled_mlp > 1:
            tiles.tile_mlps(model, plan.tiled_mlp)
        if plan.tiled_logits > 1:
            self.tiled_head = tiles.TiledHead(model, plan.tiled_logits)
        if plan.offload_activations:
            self.host_activations = host_activations.checkpoints_on_host(model)
        self.places = hf_checkpoint.places(model, self.groups, self.engine_fields["model"])

    def _ulysses(self, fields: dict[str, Any]) -> Any:
        """Put DeepSpeed's exchange of sequence shards for heads around the attention; its groups, for the engine."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        groups = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=self.model,
            core_attn_implementation=fields["attn_implementation"],
            sequence_parallel_size=self.plan.cp,
            micro_batch_size=self.plan.micro_batch_size,
            seq_length=self.plan.training.seq_length,
            seq_length_is_variable=False,
        )
        return auto_ep.BesideUlysses(groups) if self.plan.ep > 1 else groups

    def around_passes(self) -> contextlib.AbstractContextManager[Any]:
        return super().around_passes() if self.host_activations is None else self.host_activations

    def _backward(self, loss: torch.Tensor) -> None:
        """The loss of balance goes into the gradients and not into what is reported, as Megatron's does."""
        total = loss if self.balance is None else loss + self.balance
        self.engine.backward(total / summed_over_sequence(self.plan))

    def _loss(self, batch: Batch) -> torch.Tensor:
        mine = self.part(batch)
        if self.tiled_head is not None:
            with self.tiled_head.left_out():
                hidden = self.engine(input_ids=mine["tokens"], position_ids=mine["positions"], use_cache=False).logits
            return self.tiled_head.mean_loss(mine, hidden)
        found: list[torch.Tensor] = []
        coefficient = self.engine_fields["model"].get("expert_balance", 0.0) if self.model.training else 0.0
        stack = self.plan.model.stack
        losses, self.logits = hugging_face.losses(self.engine, stack, mine, balance=found if coefficient else None)
        self.balance = coefficient * found[0] if found else None
        return mean_loss(mine, losses)

    def part(self, batch: Batch) -> Batch:
        """This rank's part of each sequence under Ulysses, with its positions; every part predicts as many tokens, or "loss_scale" evens
        them out."""
        if self.plan.cp == 1:
            return batch
        rank = self.groups.rank("cp")
        parts = {name: tensor.chunk(self.plan.cp, dim=1)[rank].contiguous() for name, tensor in batch.items() if tensor.dim() > 1}
        return parts | {name: tensor * self.plan.cp for name, tensor in batch.items() if name == "loss_scale"}


def build(plan: Plan, engine: dict[str, Any], device: torch.device) -> HuggingFaceTrainer | TracedTrainer:
    """The trainer of this rank; torch.distributed must be initialised. `engine` is the content of engine.json. Raises InputError for a plan
    that it can't run."""
    if plan.pp > 1:
        raise InputError("pin.pp", plan.pp, "Hugging Face models have no pipeline here", ["1"])
    if plan.sequence_parallel:
        raise InputError("pin.sequence_parallel", True, "DeepSpeed has none of Megatron's; pin.cp is its Ulysses", ["false"])
    if plan.model.traced is not None:
        return TracedTrainer(plan, engine, device)
    return HuggingFaceTrainer(plan, engine, device)


if __name__ == "__main__":
    loop.main(build)
