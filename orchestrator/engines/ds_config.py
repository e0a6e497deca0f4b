"""A plan as DeepSpeed's JSON: concrete numbers for our worker and for use by hand, and a variant that the HF Trainer fills.

Bucket sizes are elements, not bytes (deepspeed/runtime/zero/config.py:113-251). Nothing is left to a default that changes training:
without `gradient_clipping` DeepSpeed clips at 1.0, and without `grad_accum_dtype` it sums bf16 gradients in bf16.
"""

from __future__ import annotations

import json
from typing import Any, Final

from orchestrator.engines.ds_pipeline import SECTION, is_pipeline_module
from orchestrator.engines.passthrough import with_ds
from orchestrator.job import File
from orchestrator.model.families import describe
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan

BUCKET_ELEMENTS: Final = 50_000_000
"""Elements of a reduction bucket: large enough for bandwidth, 0.2 GB in fp32 (DeepSpeed's default for prefetching). A weight that is larger
is reduced alone, which costs less than a buffer of the vocabulary's size (0.5e9 elements for llama3_8b)."""

PREFETCH_ELEMENTS: Final = 50_000_000
"""Weights that ZeRO-3 gathers ahead of their use, at most (DeepSpeed's default; less than a large layer, more than one GEMM's weights)."""

LIVE_LAYERS: Final = 3
"""ZeRO-3 may hold the layer at work, the prefetched one, and one not yet released (README sizing: 2 to 3 layers)."""

PERSISTENCE_PER_HIDDEN: Final = 10
"""Weights up to 10 * hidden_size elements (norms, biases) stay gathered; the HF Trainer's own choice."""

FP16: Final[dict[str, Any]] = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""Dynamic loss scaling (loss_scale 0) with DeepSpeed's defaults, written out."""


def _even(elements: int) -> int:
    """stage_1_and_2.py:389 refuses an odd allgather bucket."""
    return elements + elements % 2


class Sizes:
    """Elements on one tensor-parallel rank that size the buckets."""

    def __init__(self, spec: ModelSpec, tp: int) -> None:
        layers = [run.layer for run in spec.runs]
        self.total = sum(run.layer.local_parameters(tp) * run.count for run in spec.runs)
        self.largest_weight = max(weight.local_numel(tp) for layer in layers for weight in layer.weights)
        self.layer = max(layer.local_parameters(tp) for layer in layers if layer.recomputable)

    @property
    def bucket(self) -> int:
        """A bucket larger than the model is memory for nothing."""
        return _even(min(self.total, BUCKET_ELEMENTS))

    @property
    def prefetch(self) -> int:
        """Never more than the next layer."""
        return min(self.layer, PREFETCH_ELEMENTS)

    @property
    def live(self) -> int:
        return max(LIVE_LAYERS * self.layer, self.largest_weight + self.layer)


def sizes(plan: Plan) -> Sizes:
    return Sizes(describe(plan.model, plan.training.seq_length, plan.training.decoder_seq_length), plan.tp)


def optimizer(plan: Plan) -> dict[str, Any]:
    """AdamW as torch's own on a CPU, where DeepSpeed's kernels would have to be compiled first."""
    training = plan.training
    if training.optimizer == "sgd":
        return {"type": "SGD", "params": {"lr": training.lr, "momentum": 0.0, "weight_decay": training.weight_decay}}
    params: dict[str, Any] = {
        "lr": training.lr,
        "betas": list(training.betas),
        "eps": training.eps,
        "weight_decay": training.weight_decay,
    }
    if plan.cluster.is_cpu:
        params["torch_adam"] = True
    return {"type": "AdamW", "params": params}


def scheduler(plan: Plan) -> dict[str, Any] | None:
    """The nearest of DeepSpeed's schedules, for use by hand; our worker sets the learning rate itself, the same way for every engine."""
    training = plan.training
    warmup = {"warmup_num_steps": max(1, training.warmup), "warmup_type": "linear"}
    if training.schedule == "constant":
        if not training.warmup:
            return None
        return {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": training.lr, **warmup}}
    if training.schedule == "linear":
        params = {"total_num_steps": training.steps, "warmup_min_lr": 0.0, "warmup_max_lr": training.lr, **warmup}
        return {"type": "WarmupDecayLR", "params": params}
    floor = training.min_lr / training.lr
    return {"type": "WarmupCosineLR", "params": {"total_num_steps": training.steps, "cos_min_ratio": floor, **warmup}}


def zero_optimization(plan: Plan) -> dict[str, Any]:
    """The section of that name."""
    stage = plan.zero_stage
    if stage == 0:
        return {"stage": 0}
    size = sizes(plan)
    section: dict[str, Any] = {
        "stage": stage,
        # Under a pipeline schedule the reduction waits for the last micro-batch; a CPU has no second stream.
        "overlap_comm": plan.pp == 1 and not plan.cluster.is_cpu,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": size.bucket,
        "allgather_bucket_size": size.bucket,
    }
    if stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": size.prefetch,
            "stage3_param_persistence_threshold": PERSISTENCE_PER_HIDDEN * plan.model.hidden_size,
            "stage3_max_live_parameters": size.live,
            "stage3_max_reuse_distance": size.live,
            "sub_group_size": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
        if plan.zero_shard_size is not None:
            section["zero_hpz_partition_size"] = plan.zero_shard_size
    if plan.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": not plan.cluster.is_cpu}
    return section


def _precision(plan: Plan) -> dict[str, Any]:
    training = plan.training
    section: dict[str, Any] = {}
    if training.precision in ("bf16", "fp8"):
        section["bf16"] = {"enabled": True}
    elif training.precision == "fp16":
        section["fp16"] = dict(FP16)
    # Stage 0 refuses any type but the model's (runtime/engine.py:2294-2325) and takes that by itself.
    if section and plan.zero_stage >= 1:
        section["data_types"] = {"grad_accum_dtype": training.grad_accum_dtype}
    section["communication_data_type"] = training.grad_reduce_dtype
    return section


def tensor_parallel(plan: Plan) -> dict[str, Any]:
    """AutoTP. Divided logits need DeepSpeed's own loss, which would take the place of the model's (runtime/engine.py:1100-1120)."""
    return {"autotp_size": plan.tp, "vocab_parallel_lm_head": False}


def ds_config(plan: Plan) -> dict[str, Any]:
    """What the engine gets. With tp=1 all three batch fields; otherwise train_batch_size is left out: without Megatron's groups
    DeepSpeed would check it against the whole world (README "silently wrong" 5)."""
    config: dict[str, Any] = {}
    if plan.tp == 1:
        config["train_batch_size"] = plan.global_batch_size
    config |= {
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": plan.training.clip,
        "steps_per_print": max(1, plan.training.steps),
        **_precision(plan),
        "optimizer": optimizer(plan),
        "zero_optimization": zero_optimization(plan),
    }
    if is_pipeline_module(plan):
        config["pipeline"] = dict(SECTION)
    if plan.engine == "deepspeed" and plan.tp > 1:
        config["tensor_parallel"] = tensor_parallel(plan)
    if plan.training.optimizer == "sgd" and plan.zero_stage >= 1:
        config["zero_allow_untested_optimizer"] = True
    return with_ds(config, plan)


def by_hand(plan: Plan) -> dict[str, Any]:
    """`ds_config` with the schedule, for a script that leaves the learning rate to DeepSpeed."""
    config = ds_config(plan)
    schedule = scheduler(plan)
    return config | {"scheduler": schedule} if schedule else config


def for_trainer(plan: Plan) -> dict[str, Any]:
    """`ds_config` with "auto" where `transformers.Trainer` and accelerate fill in what they are given (raw DeepSpeed drops it or refuses).

    The schedule is left to the Trainer. With tp>1 the Trainer gets DeepSpeed's AutoTP of that size.
    """
    config = ds_config(plan)
    config |= {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    for name in ("bf16", "fp16"):
        if name in config:
            config[name] = config[name] | {"enabled": "auto"}
    params = config["optimizer"]["params"]
    # Not Adam's betas and eps, which accelerate can't fill, nor the clipping, which it would fill with 1.0 whatever it is told. The Trainer
    # names them where its arguments say otherwise.
    filled = {name: "auto" for name in ("lr", "weight_decay") if name in params}
    config["optimizer"] = config["optimizer"] | {"params": params | filled}
    zero = config["zero_optimization"]
    sized = ["reduce_bucket_size"]
    if zero["stage"] == 3:
        sized += ["stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]
    config["zero_optimization"] = zero | {name: "auto" for name in sized if name in zero}
    if plan.tp > 1:
        config["tensor_parallel"] = tensor_parallel(plan)
        # The Trainer would fill it with micro * accumulation * world: tp times the samples that are there.
        del config["train_batch_size"]
    return with_ds(config, plan)


def dumps(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def deepspeed_files(plan: Plan) -> tuple[list[File], list[str]]:
    """ds_config.json and ds_config.auto.json, and what a user should know of them."""
    files = [File(path="ds_config.json", content=dumps(by_hand(plan))), File(path="ds_config.auto.json", content=dumps(for_trainer(plan)))]
    found = [f"ds_config.json assumes {plan.dp} data-parallel ranks of {plan.world_size}."]
    if plan.pp > 1:
        found.append("ds_config.auto.json: the HF Trainer has no pipeline; it would run these settings over data parallelism.")
    if is_pipeline_module(plan):
        found.append('ds_config.json says nothing of stages: a script of your own gives PipelineModule those of engine.json, "pipeline".')
    training = plan.training
    if training.schedule == "linear" and training.min_lr > 0:
        found.append(f"ds_config.json: DeepSpeed's linear schedule ends at 0, not at min_lr={training.min_lr}; our worker's ends there.")
    return files, found


def deepspeed_environment(plan: Plan) -> dict[str, str]:
    """What DeepSpeed needs of the ranks' environment: on a machine without GPUs it would look for one."""
    return {"DS_ACCELERATOR": "cpu"} if plan.cluster.is_cpu else {}
