"""Files of programs around Hugging Face's Trainer with names of their own (Axolotl, ms-swift: words/trainer.py), as its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from orchestrator.audit.document import AUTO, Content
from orchestrator.words.trainer import AROUND, Around

NAMED_CONFIGS: Final = {
    name: {"zero_optimization": {"stage": int(name[4]), "offload_optimizer": {"device": "cpu" if "offload" in name else "none"}}}
    for name in ("zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
}
"""ds_configs that ms-swift has by name (swift/config)."""
TUNES: Final = frozenset({"tuner_type", "train_type"})
"""ms-swift's setting of what is trained, LoRA's adapters where it is not said; the second before 4.0."""
GROUPS: Final = {
    "cp": ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size"),
    "tp": ("tensor_parallel_size", "deepspeed_autotp_size"),
}
"""Sizes of groups by names of these programs."""


def around(content: Mapping[str, Any]) -> Around | None:
    """The program whose names these are; None: they are the Trainer's own."""
    if "base_model" in content or ("sequence_len" in content and "micro_batch_size" in content):
        return AROUND["axolotl"]
    if not TUNES.isdisjoint(content) or ("model" in content and "model_name_or_path" not in content):
        return AROUND["ms_swift"]
    return None


def as_trainers(content: Content, program: Around) -> Content:
    """The file's settings by the Trainer's names. What it says of FSDP, adapters and types is said as the Trainer has it."""
    ours = {theirs: name for name, theirs in program.names.items()} | dict.fromkeys(TUNES, "finetuning_type")
    found = dict(program.defaults) | {ours.get(name, name): value for name, value in content.items() if value is not None}
    found["finetuning_type"] = "lora" if found.get("finetuning_type") in ("lora", "qlora", "longlora") else "full"
    if found.pop("lora_target_linear", False):
        found["lora_target"] = "all-linear"
    if found.get("bf16") == AUTO:
        found["bf16"] = True
    kind = str(found.get("torch_dtype", ""))
    if "float16" in kind:
        found.setdefault("fp16" if kind == "float16" else "bf16", True)
    elif program.loads_16_bits and not kind and not found.get("fp16"):
        found.setdefault("bf16", True)
    if str(found.get("deepspeed")) in NAMED_CONFIGS:
        found["deepspeed"] = NAMED_CONFIGS[str(found["deepspeed"])]
    if isinstance(found.get("fsdp_config"), dict) and not found.get("fsdp"):
        found["fsdp"] = True
    if isinstance(found.get("gradient_checkpointing"), str):  # where Axolotl keeps what is kept: "offload", "offload_disk"
        found |= {"activation_offloading": found["gradient_checkpointing"], "gradient_checkpointing": True}
    return found
