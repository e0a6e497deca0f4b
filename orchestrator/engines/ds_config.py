"""A plan as DeepSpeed's JSON: concrete numbers for use by hand, and what ZeRO-3 divides a model by as it is built.

It has no learning-rate schedule: none of DeepSpeed's classes has the step at the peak after a cosine's warm-up (runtime/lr_schedules.py),
and a file that has one for some plans only is a trap. BY_HAND.md gives the plan's.

Bucket sizes are elements, not bytes (deepspeed/runtime/zero/config.py:113-251). Nothing is left to a default that changes training:
without `gradient_clipping` DeepSpeed clips at 1.0, and without `grad_accum_dtype` it sums bf16 gradients in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from orchestrator.engines.passthrough import with_ds
from orchestrator.engines.traced import partition_config
from orchestrator.engines.transformer_config import ENDS
from orchestrator.job import File
from orchestrator.model.families import describe_for
from orchestrator.model.freezing import trained_parameters
from orchestrator.model.training import EIGHT_BIT
from orchestrator.plan import Plan
from orchestrator.strategy.spec import RECOMPUTE_MODULES
from orchestrator.words import deepspeed as words
from orchestrator.words.terms import nested, say

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
    """The number made even: stage_1_and_2.py:389 refuses an odd allgather bucket."""
    return elements + elements % 2


def buckets(plan: Plan) -> dict[str, Any]:
    """How ZeRO's groups of tensors are made, which no plan decides: settings by path, in elements on one tensor-parallel rank."""
    stage = plan.zero_stage
    if stage == 0:
        return {}
    training = plan.training
    spec = describe_for(plan.model, training)
    layers = [run.layer for run in spec.runs]
    largest_layer = max(layer.local_parameters(plan.tp) for layer in layers if layer.recomputable)
    largest_weight = max(weight.local_numel(plan.tp) for layer in layers for weight in layer.weights)
    trained = sum(run.layer.local_parameters(plan.tp) * run.count for run in spec.runs)
    if training.lora is not None or training.freeze:
        trained = trained_parameters(spec, training)
    bucket = _even(min(trained, BUCKET_ELEMENTS))  # one that is larger than what is trained is memory for nothing
    section: dict[str, Any] = {
        # Under a pipeline schedule the reduction waits for the last micro-batch; a CPU has no second stream.
        "overlap_comm": plan.pp == 1 and not plan.cluster.is_cpu,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        live = max(LIVE_LAYERS * largest_layer, largest_weight + largest_layer)
        section |= {
            "stage3_prefetch_bucket_size": min(largest_layer, PREFETCH_ELEMENTS),
            "stage3_param_persistence_threshold": PERSISTENCE_PER_HIDDEN * plan.model.hidden_size,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
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


PIPELINE: Final[dict[str, Any]] = {
    # Each layer checkpoints itself as the plan says: DeepSpeed's interval is one for all (runtime/pipe/module.py:340).
    "activation_checkpoint_interval": 0,
    # Boundary tensors go whole, as they are priced; under sequence parallelism each rank's is its own part already.
    "pipe_partitioned": False,
    "grad_partitioned": False,
}
"""The section "pipeline" of ds_config.json."""


def is_pipeline_module(plan: Plan) -> bool:
    """Whether DeepSpeed's own pipeline runs the plan, not megatron-core's."""
    return plan.schedule == "deepspeed_1f1b"


def pipeline_fields(plan: Plan) -> dict[str, Any]:
    """The section "pipeline" of engine.json. "bounds": stage i has layers bounds[i] to bounds[i + 1]; "recompute": of each transformer
    layer, the modules that are computed again, or "full"; "tied": embedding and head are one weight."""
    bounds = [0]
    for stage in plan.stages:
        bounds.append(bounds[-1] + sum(span.count for span in stage.layers))
    again = {"none": (), "full": ("full",), **RECOMPUTE_MODULES}
    return {
        "bounds": bounds,
        "recompute": [[*again[span.recompute]] for _, span in plan.spans() if span.kind not in ENDS for _ in range(span.count)],
        "tied": plan.model.tie_embeddings,
        "seq_length": plan.training.seq_length,
    }


def ds_config(plan: Plan, more: Mapping[str, Any] = {}) -> dict[str, Any]:
    """What the engine gets. `more`: settings by path that this engine alone has."""
    training = plan.training
    settings: dict[str, Any] = {"steps_per_print": max(1, training.steps), **buckets(plan)}
    if training.precision == "fp16":
        settings |= LOSS_SCALE
    if training.optimizer == "sgd":
        settings |= {"optimizer.params.momentum": 0.0, **({"zero_allow_untested_optimizer": True} if plan.zero_stage else {})}
    elif training.optimizer in EIGHT_BIT:
        settings["zero_allow_untested_optimizer"] = True
    elif plan.cluster.is_cpu:  # where DeepSpeed's own kernel would have to be compiled first
        settings["optimizer.params.torch_adam"] = True
    if is_pipeline_module(plan):
        settings["pipeline"] = PIPELINE
    return with_ds(nested(say((*words.SIZES, *words.TRAINING, *words.ZERO), plan) | settings | dict(more)), plan)


def dumps(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def deepspeed_file(plan: Plan, more: Mapping[str, Any] = {}) -> tuple[File, list[str]]:
    """ds_config.json, and what a user should know of it. `more`: as `ds_config`."""
    found = [f"ds_config.json assumes {plan.dp} data-parallel ranks of {plan.world_size}."]
    if is_pipeline_module(plan):
        found.append('ds_config.json says nothing of stages: a script of your own gives PipelineModule those of engine.json, "pipeline".')
    own = "the learning rate's schedule and two groups of parameters, as norms and biases don't decay"
    found.append(f"ds_config.json: what a script gives itself is {own}; orchestrator/engines/BY_HAND.md has the lines.")
    if plan.zero_stage == 0 and plan.training.precision != "fp32":
        found.append(f"ds_config.json: {STEPS_WHEN_BUILT}.")
    return File(path="ds_config.json", content=dumps(ds_config(plan, more))), found


STEPS_WHEN_BUILT: Final = "at stage 0 in 16 bits DeepSpeed steps once when it is built (weights decay by lr, Adam counts one more)"
"""fp16/unfused_optimizer.py and fused_optimizer.py:125, initialize_optimizer_states."""


def deepspeed_environment(plan: Plan) -> dict[str, str]:
    """What DeepSpeed needs of the ranks' environment: on a machine without GPUs it would look for one."""
    return {"DS_ACCELERATOR": "cpu"} if plan.cluster.is_cpu else {}
