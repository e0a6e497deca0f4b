"""A plan as DeepSpeed's JSON: concrete numbers for our worker and for use by hand, and a variant that the HF Trainer fills.

Bucket sizes are elements, not bytes (deepspeed/runtime/zero/config.py:113-251). Nothing is left to a default that changes training:
without `gradient_clipping` DeepSpeed clips at 1.0, and without `grad_accum_dtype` it sums bf16 gradients in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import pi
from types import MappingProxyType
from typing import Any, Final

from orchestrator.engines.ds_pipeline import SECTION, is_pipeline_module
from orchestrator.engines.passthrough import with_ds
from orchestrator.engines.traced import partition_config
from orchestrator.job import File
from orchestrator.model.families import describe
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.lora import Lora, trainable_parameters, with_lora
from orchestrator.model.spec import ModelSpec
from orchestrator.plan import Plan
from orchestrator.words import deepspeed as words
from orchestrator.words.terms import nested, say

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

BUCKET_ELEMENTS: Final = 50_000_000
"""Elements of a reduction bucket: large enough for bandwidth, 0.2 GB in fp32 (DeepSpeed's default for prefetching). A weight that is larger
is reduced alone, which costs less than a buffer of the vocabulary's size (0.5e9 elements for llama3_8b)."""

PREFETCH_ELEMENTS: Final = 50_000_000
"""Weights that ZeRO-3 gathers ahead of their use, at most (DeepSpeed's default; less than a large layer, more than one GEMM's weights)."""

LIVE_LAYERS: Final = 3
"""ZeRO-3 may hold the layer at work, the prefetched one, and one not yet released (README sizing: 2 to 3 layers)."""

PERSISTENCE_PER_HIDDEN: Final = 10
"""Weights up to 10 * hidden_size elements (norms, biases) stay gathered; the HF Trainer's own choice."""

LOSS_SCALE: Final = {"fp16.loss_scale": 0, "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000, "fp16.hysteresis": 2,
                     "fp16.min_loss_scale": 1}  # fmt: skip
"""Dynamic loss scaling (loss_scale 0) with DeepSpeed's defaults, written out."""


def _even(elements: int) -> int:
    """stage_1_and_2.py:389 refuses an odd allgather bucket."""
    return elements + elements % 2


class Sizes:
    """Elements on one tensor-parallel rank that size the buckets; `total`: of what is trained."""

    def __init__(self, spec: ModelSpec, tp: int, lora: Lora | None = None) -> None:
        layers = [run.layer for run in spec.runs]
        self.total = sum(run.layer.local_parameters(tp) * run.count for run in spec.runs) if lora is None else _adapters(spec, lora)
        self.largest_weight = max(weight.local_numel(tp) for layer in layers for weight in layer.weights)
        self.layer = max(layer.local_parameters(tp) for layer in layers if layer.recomputable)

    @property
    def bucket(self) -> int:
        """A bucket larger than what is trained is memory for nothing."""
        return _even(min(self.total, BUCKET_ELEMENTS))

    @property
    def prefetch(self) -> int:
        """Never more than the next layer."""
        return min(self.layer, PREFETCH_ELEMENTS)

    @property
    def live(self) -> int:
        return max(LIVE_LAYERS * self.layer, self.largest_weight + self.layer)


def _adapters(spec: ModelSpec, lora: Lora) -> int:
    return trainable_parameters(with_lora(hugging_face(spec), lora))


def sizes(plan: Plan) -> Sizes:
    training = plan.training
    return Sizes(describe(plan.model, training.seq_length, training.decoder_seq_length), plan.tp, training.lora)


def scheduler(plan: Plan) -> dict[str, Any] | None:
    """The plan's schedule for use by hand, by DeepSpeed's own classes (runtime/lr_schedules.py); our worker sets the rates itself.

    DeepSpeed steps its scheduler after each step and begins at last_batch_iteration=-1, so that its Warmup* classes are one step late (the
    first two steps are at 0), and raises their warmup_num_steps to 2. Begun later they don't touch the first step's rate, which is then
    the optimizer's (`first_rate`): so constant rates after a warm-up and a cosine without one are the plan's in every step. OneCycle counts
    as the plan does: a linear decay is its second half, as long as it takes from `lr` to 0. A cosine after a warm-up can't be had
    (`cosine_error`).
    """
    training = plan.training
    lr, min_lr, warmup, steps = training.lr, training.min_lr, training.warmup, training.steps
    if _is_constant(plan):
        if not warmup:
            return None
        counted = max(DS_LEAST_WARMUP, warmup)
        return {"type": "WarmupLR", "params": {
            "warmup_min_lr": 0.0, "warmup_max_lr": lr, "warmup_num_steps": counted, "warmup_type": "linear",
            "last_batch_iteration": counted - warmup,
        }}  # fmt: skip
    if training.schedule == "linear":
        if warmup:
            to_zero = max(0, steps - warmup) * lr / (lr - min_lr)
            cycle = {"cycle_min_lr": 0.0, "cycle_max_lr": lr, "cycle_first_step_size": warmup, "cycle_second_step_size": to_zero}
        else:  # from the peak on, which is after a first half of one step
            cycle = {"cycle_min_lr": min_lr, "cycle_max_lr": lr, "cycle_first_step_size": 1, "cycle_second_step_size": steps,
                     "last_batch_iteration": 0}  # fmt: skip
        return {"type": "OneCycle", "params": cycle | {"cycle_momentum": False}}
    params: dict[str, Any] = {"cos_min_ratio": min_lr / lr, "warmup_type": "linear"}
    if warmup:
        # Half of what is missing at the end of the warm-up is too much at its beginning: the largest error is the least.
        params |= {"total_num_steps": steps, "warmup_num_steps": warmup, "warmup_min_ratio": 2 / (warmup + 1)}
    else:
        late = DS_LEAST_WARMUP
        params |= {"total_num_steps": steps + late, "warmup_num_steps": late, "last_batch_iteration": late - 1}
    return {"type": "WarmupCosineLR", "params": params}


DS_LEAST_WARMUP: Final = 2
"""What DeepSpeed raises a smaller warmup_num_steps to (runtime/lr_schedules.py)."""


def _is_constant(plan: Plan) -> bool:
    training = plan.training
    return training.schedule == "constant" or (training.schedule == "linear" and training.min_lr == training.lr)


def first_rate(plan: Plan) -> float:
    """The optimizer's own rate in the file for use by hand: that of the first step, where the scheduler begins with the second."""
    return 0.0 if _is_constant(plan) and plan.training.warmup else plan.training.lr


def cosine_error(plan: Plan) -> float:
    """How far the rates of `scheduler` are from the plan's at most, as a share of `lr`: 0 but for a cosine after a warm-up, of which
    DeepSpeed's WarmupCosineLR has no step at the peak.

    With W warm-up steps its step s is at (2 + (s-1)(W-1)/W)/(W+1) in place of s/W, (W-1)/(W(W+1)) off in the first and in the last; its
    cosine is the plan's. With one it is at the peak twice, and then a step late: the cosine's steepest slope is pi/2.
    """
    training = plan.training
    warmup = training.warmup
    if training.schedule != "cosine" or not warmup:
        return 0.0
    return pi / 2 / max(1, training.steps - 1) if warmup == 1 else (warmup - 1) / (warmup * (warmup + 1))


def buckets(plan: Plan) -> dict[str, Any]:
    """How ZeRO's groups of tensors are made, which no plan decides: settings by path."""
    stage = plan.zero_stage
    if stage == 0:
        return {}
    size = sizes(plan)
    section: dict[str, Any] = {
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
    if plan.offload_optimizer:
        section["offload_optimizer.pin_memory"] = not plan.cluster.is_cpu
    return {f"zero_optimization.{name}": value for name, value in section.items()}


ADAPTED: Final = tuple(
    {"patterns": [rf".*\.({linears})_proj(\.base_layer|\.lora_{letter}\.default)?\.weight$"], "partition_type": by}
    for linears, letter, by in (("q|k|v|gate|up", "B", "column"), ("o|down", "A", "row"))
)
"""Partition of a model with adapters: linears divided by columns divide B with them, by rows A; the other half of each pair is whole on
every rank, and so is its gradient. With or without an adapter on the linear. (DeepSpeed's autotp_config.py; the model's own plan names no
adapter.)"""


def auto_tp(plan: Plan) -> dict[str, Any]:
    """AutoTP beside its size. Divided logits need DeepSpeed's own loss, in place of the model's (runtime/engine.py:1100-1120)."""
    section: dict[str, Any] = {"vocab_parallel_lm_head": False}
    if plan.model.traced is not None:
        section["partition_config"] = partition_config(plan.model.traced.divided)
    elif plan.training.lora is not None:
        section["partition_config"] = {"use_default_specs": False, "layer_specs": list(ADAPTED)}
    return section


def ds_config(plan: Plan, more: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """What the engine gets. `more`: settings by path that this engine alone has."""
    training = plan.training
    settings: dict[str, Any] = {"steps_per_print": max(1, training.steps), **buckets(plan)}
    if training.precision == "fp16":
        settings |= LOSS_SCALE
    if training.optimizer == "sgd":
        settings |= {"optimizer.params.momentum": 0.0, **({"zero_allow_untested_optimizer": True} if plan.zero_stage else {})}
    elif plan.cluster.is_cpu:  # where DeepSpeed's own kernel would have to be compiled first
        settings["optimizer.params.torch_adam"] = True
    if is_pipeline_module(plan):
        settings["pipeline"] = SECTION
    return with_ds(nested(say((*words.SIZES, *words.TRAINING, *words.ZERO), plan) | settings | dict(more)), plan)


def by_hand(plan: Plan, more: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """`ds_config` with the schedule, for a script that leaves the learning rate to DeepSpeed."""
    config = ds_config(plan, more)
    schedule = scheduler(plan)
    if schedule is None:
        return config
    optimizer = config["optimizer"]
    return config | {"optimizer": optimizer | {"params": optimizer["params"] | {"lr": first_rate(plan)}}, "scheduler": schedule}


def for_trainer(plan: Plan, more: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """`ds_config` with "auto" where `transformers.Trainer` and accelerate fill in what they are given (raw DeepSpeed drops it or refuses).

    The schedule is left to the Trainer. With tp>1 the Trainer gets DeepSpeed's AutoTP of that size.
    """
    config = ds_config(plan, more)
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
    config.pop("sequence_parallel_size", None)  # the Trainer's ParallelismConfig has it
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp, **auto_tp(plan)}
        # The Trainer would fill it with micro * accumulation * world: tp times the samples that are there.
        del config["train_batch_size"]
    return with_ds(config, plan)


def dumps(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def deepspeed_files(plan: Plan, more: Mapping[str, Any] = NOTHING) -> tuple[list[File], list[str]]:
    """ds_config.json and ds_config.auto.json, and what a user should know of them. `more`: as `ds_config`."""
    contents = {"ds_config.json": by_hand(plan, more), "ds_config.auto.json": for_trainer(plan, more)}
    files = [File(path=path, content=dumps(content)) for path, content in contents.items()]
    found = [f"ds_config.json assumes {plan.dp} data-parallel ranks of {plan.world_size}."]
    if plan.pp > 1:
        found.append("ds_config.auto.json: the HF Trainer has no pipeline; it would run these settings over data parallelism.")
    if is_pipeline_module(plan):
        found.append('ds_config.json says nothing of stages: a script of your own gives PipelineModule those of engine.json, "pipeline".')
    found += _schedule_notes(plan)
    return files, found


def _schedule_notes(plan: Plan) -> list[str]:
    """What someone who uses ds_config.json by hand should know of its learning rates."""
    training, found = plan.training, []
    error = cosine_error(plan)
    if error:
        off = f"its rates are up to {100 * error:.2g}% of lr off the plan's, which our worker's are"
        found.append(f"ds_config.json: DeepSpeed's cosine has no step at the peak after a warm-up: {off}.")
    if first_rate(plan) != training.lr:
        own = f"With a scheduler of your own write lr={training.lr} there"
        found.append(f"ds_config.json: optimizer.params.lr is the first step's, 0; the scheduler has the peak. {own}.")
    schedule = scheduler(plan)
    params = schedule["params"] if schedule else {}
    if "warmup_num_steps" in params and (params["warmup_num_steps"] != training.warmup or first_rate(plan) != training.lr):
        said = "looks for its own arguments in this scheduler and refuses it; it takes ds_config.auto.json"
        found.append(f"ds_config.json: the HF Trainer {said}.")
    return found


def deepspeed_environment(plan: Plan) -> dict[str, str]:
    """What DeepSpeed needs of the ranks' environment: on a machine without GPUs it would look for one."""
    return {"DS_ACCELERATOR": "cpu"} if plan.cluster.is_cpu else {}
