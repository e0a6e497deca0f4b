"""A plan as the job of `orchestrator.programs.hugging_face`."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.engines import passthrough
from orchestrator.engines.deepspeed import trainer_files
from orchestrator.engines.deepspeed.capabilities import REQUIREMENTS
from orchestrator.engines.deepspeed.experts import PRESETS, balance
from orchestrator.engines.ds_config import auto_tp, deepspeed_environment, deepspeed_file, ds_config
from orchestrator.engines.hf_config import class_of, hf_fields
from orchestrator.engines.traced import partition_note, traced_fields
from orchestrator.engines.translation import assemble, engine_file
from orchestrator.job import Job
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan
from orchestrator.strategy.spec import DEEPSPEED_OPTIONS, DEFAULTS
from orchestrator.words import deepspeed as words
from orchestrator.words.terms import say

PROGRAM: Final = "orchestrator.programs.hugging_face"
DRAWN: Final = ("llava", "gemma3", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Kinds of models that look at images for which samples are drawn; those with tiles, or with experts, get none."""
PASSES: Final[dict[str, tuple[str, ...]]] = {passthrough.DS: ()}
"""A ds_config has no sections of its own."""


def translate(plan: Plan) -> Job:
    """The job of a plan; writes nothing. Raises InputError where the ranks don't fill the nodes evenly, or the user's own values contradict
    the plan."""
    more = own_settings(plan)
    model = hf_fields(plan) | balance(plan.model) if plan.model.traced is None else traced_fields(plan)
    engine = engine_file(plan, REQUIREMENTS, {"model": model, "ds_config": ds_config(plan, more)})
    file, notes = deepspeed_file(plan, more)
    files = trainer_files.trainer_files(plan, more)
    notes += trainer_files.notes(plan)
    trained = "a model of Hugging Face transformers" if plan.model.traced is None else plan.model.traced.model_class
    notes.append(f"megatron_args.sh was not written: engine={plan.engine} trains {trained}.")
    worked = [name for name in DEEPSPEED_OPTIONS if getattr(plan, name) != DEFAULTS[name]]
    if worked:
        notes.append(f"ds_config.json has no field for {', '.join(worked)}: {PROGRAM} calls DeepSpeed's functions for it.")
    if plan.model.traced is not None and plan.tp > 1:
        notes.append(partition_note(plan.model.traced, plan.tp))
    if any(part.expert_bias for part in plan.model.experts):
        notes.append("transformers' routers don't move the biases that balance experts: they stay as they are in the first step.")
    if plan.model.stack == "encoder":
        notes.append("transformers' BERT norms after each sublayer, Megatron's before: the same size, not the same model.")
    quantised = plan.training.lora is not None and plan.training.lora.bits is not None
    only = "our programs quantise no weights (lora.bits): write=llama_factory,axolotl,ms_swift have those that do" if quantised else ""
    if plan.model.vision is not None and plan.model.vision.model_type not in DRAWN:
        only = f"our program draws no images for {plan.model.vision.model_type}, only for {', '.join(DRAWN)}; entry= starts one of yours"
    return assemble(plan, PROGRAM, [engine, file, *files], notes, deepspeed_environment(plan), without_worker=only, passes=PASSES)


TO_TORCH: Final = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch CHECKPOINT/states weights.pt"
"""torch's own command that writes a checkpoint's tensors by name into one file."""


def own_settings(plan: Plan) -> dict[str, Any]:
    """What DeepSpeed's configuration says of parallelism that is DeepSpeed's own: Ulysses, AutoTP and AutoEP; by path."""
    found = say(words.OWN_PARALLELISM, plan)
    if plan.tp > 1:
        found |= {f"tensor_parallel.{name}": value for name, value in auto_tp(plan).items()}
    if plan.ep > 1:
        found |= {"expert_parallel.enabled": True, "expert_parallel.preset_model": PRESETS[class_of(plan.model).model]}
    return found


def why_no_exchange(architecture: Architecture, model_type: str | None) -> str | None:
    """Why weights can't go between this engine's model of this architecture and transformers'; None: they can
    (`Engine.why_no_exchange`)."""
    if architecture.traced is not None:
        if architecture.traced.config:
            return None
        made = f"weights of {architecture.traced.model_class}, which model.code= makes, are neither loaded nor exported here"
        return f"{made}; {TO_TORCH} writes those of a checkpoint (train.save_every=), each as weight/NAME"
    if architecture.stack == "encoder_decoder" and not architecture.tie_embeddings:
        # configuration_t5.py:83: a head of its own would be left out, silently.
        return "tie_embeddings=false: transformers 5 builds every T5 with its head tied to the embedding"
    post_norm = "engine=deepspeed has a post-norm BERT (model_type bert in transformers), the checkpoint's is pre-norm"
    return post_norm if model_type == "megatron-bert" else None
