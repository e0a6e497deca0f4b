"""Hugging Face models under a DeepSpeed engine: ZeRO 0 to 3, AutoTP, Ulysses, hpZ, optimizer offload, gradient checkpointing."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from orchestrator.errors import InputError
from orchestrator.plan import Plan
from orchestrator.workers import hf_checkpoint, hugging_face, loop
from orchestrator.workers.distributed import initialise_groups
from orchestrator.workers.megatron_deepspeed import MegatronDeepSpeedTrainer, import_deepspeed, set_log_level
from orchestrator.workers.models import Batch, mean_loss


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Biases and norms (one dimension) don't decay. A partitioned parameter's own shape is flat."""
    decayed, free = [], []
    for parameter in model.parameters():
        (decayed if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 else free).append(parameter)
    return [{"params": decayed}, {"params": free, "weight_decay": 0.0}]


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


class HuggingFaceTrainer(MegatronDeepSpeedTrainer):
    """One rank: a Hugging Face model as the module of a DeepSpeed engine. megatron-core keeps the groups of the plan's order, in which
    DeepSpeed's own (neighbours first) are the same."""

    def __init__(self, plan: Plan, engine: dict[str, Any], device: torch.device) -> None:
        self.plan, self.device, self.engine_fields = plan, device, engine
        deepspeed = import_deepspeed(device)
        set_log_level(plan)
        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
        initialise_groups(plan)
        fields = engine["model"]
        source = Path(plan.run.init_from) if plan.run.init_from else None
        if source:
            hf_checkpoint.match_activation(fields, source)
        ds_config = self._ds_config(engine["ds_config"])
        # BF16_Optimizer and hpZ print their sizes.
        with contextlib.redirect_stdout(io.StringIO()):
            self.model = model = self._build(deepspeed, fields, ds_config)
            if source:
                hf_checkpoint.load(model, source)
            else:
                hugging_face.initialise(model, plan.training.seed, device)
            whole = whole_shapes(model)
            mpu = self._ulysses(fields) if plan.cp > 1 else None
            self.engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model), mpu=mpu, config=ds_config)
        if plan.tp > 1:
            tag_sliced_parameters(model, whole)
        hugging_face.restore_rotary_frequencies(model)
        self.places = hf_checkpoint.places(model, plan, fields)
        if self._steps_when_built():
            self.engine.optimizer.optimizer.state.clear()

    def _build(self, deepspeed: Any, fields: dict[str, Any], ds_config: dict[str, Any]) -> torch.nn.Module:
        """At stage 3 a weight is divided as soon as its module is built; AutoTP cuts a whole model in host memory; else on the device."""
        if fields["zero_init"]:
            # Without the batch, which it would check against the whole world even under Ulysses.
            config = {key: value for key, value in ds_config.items() if key != "train_batch_size"}
            # And without dtype, which means bf16 wherever the device has no fp16, whatever it says (partition_parameters.py:409).
            with deepspeed.zero.Init(config_dict_or_path=config):
                return hugging_face.build_model(fields)
        with torch.device("cpu" if self.plan.tp > 1 else self.device):
            return hugging_face.build_model(fields)

    def _ulysses(self, fields: dict[str, Any]) -> Any:
        """Put DeepSpeed's exchange of sequence shards for heads around the attention; its groups, for the engine."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        return UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=self.model,
            core_attn_implementation=fields["attn_implementation"],
            sequence_parallel_size=self.plan.cp,
            micro_batch_size=self.plan.micro_batch_size,
            seq_length=self.plan.training.seq_length,
            seq_length_is_variable=False,
        )

    def export(self, folder: Path) -> None:
        hf_checkpoint.export(self.model, self.plan, folder, self.engine_fields["model"])

    def forward_backward(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        logs = []
        for index, batch in enumerate(batches):
            loss = self._loss(batch)
            self.engine.backward(loss / summed_over_sequence(self.plan))
            logs.append(loss.detach())
            if index + 1 < len(batches):
                # Not a boundary: counts the micro-batch.
                self.engine.step()
        return torch.stack(logs).mean()

    def _loss(self, batch: Batch) -> torch.Tensor:
        mine = self._shard(batch)
        return mean_loss(mine, hugging_face.losses(self.engine, self.plan.model.family, mine))

    def _shard(self, batch: Batch) -> Batch:
        """This rank's part of each sequence, with its positions; every part predicts as many tokens."""
        if self.plan.cp == 1:
            return batch
        rank = parallel_state.get_context_parallel_rank()
        return {name: tensor.chunk(self.plan.cp, dim=1)[rank].contiguous() for name, tensor in batch.items()}

    def _plain_norm(self) -> float:
        """The global gradient norm at stage 0 in fp32. Parts of a tensor count on every rank, copies once."""
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        parts = [p for p in self.model.parameters() if p.grad is not None and (first or getattr(p, "tensor_model_parallel", False))]
        square = sum((p.grad.double().square().sum() for p in parts), torch.zeros((), dtype=torch.float64, device=self.device))
        dist.all_reduce(square, group=parallel_state.get_tensor_model_parallel_group())
        return math.sqrt(float(square))


def build(plan: Plan, engine: dict[str, Any], device: torch.device) -> HuggingFaceTrainer:
    """This rank's trainer; torch.distributed must be initialised. `engine` is the content of engine.json."""
    if plan.pp > 1:
        raise InputError("pin.pp", plan.pp, "Hugging Face models have no pipeline here", ["1"])
    if plan.sequence_parallel:
        raise InputError("pin.sequence_parallel", True, "DeepSpeed has none of Megatron's; pin.cp is its Ulysses", ["false"])
    return HuggingFaceTrainer(plan, engine, device)


if __name__ == "__main__":
    loop.main(build)
