"""What transformers calls a model that was trained on megatron-core's layers: the class and config of an exported checkpoint."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.engines.hf_config import config_keywords, inexpressible, model_classes
from orchestrator.model.spec import Architecture

MEGATRON_BERT: Final = ("MegatronBertConfig", "MegatronBertForMaskedLM")
"""Pre-norm, as megatron-core's BERT; BertForMaskedLM is post-norm."""

EXCHANGED: Final = ("gpt", "llama", "bert")
"""Families whose weights transformers and megatron-core share (workers/hf_weights.py). megatron-core's t5 scales its scores and has an
output bias; Hugging Face's does not and has none."""


def why_no_exchange(a: Architecture, engine: str, model_type: str | None = None) -> str | None:
    """Why weights can't go between this engine's model and transformers'; None: they can. `model_type`: of the checkpoint to load."""
    if engine == "deepspeed":
        if a.family == "t5" and not a.tie_embeddings:
            # configuration_t5.py:83: a head of its own would be left out, silently.
            return "tie_embeddings=false: transformers 5 builds every T5 with its head tied to the embedding"
        post_norm = "engine=deepspeed has a post-norm BERT (model_type bert in transformers), the checkpoint's is pre-norm"
        return post_norm if model_type == "megatron-bert" else None
    if a.family not in EXCHANGED:
        return f"megatron-core's {a.family} is another function than transformers'; weights are exchanged for {', '.join(EXCHANGED)}"
    if model_type == "bert":
        return f"engine={engine} has a pre-norm BERT (model_type megatron-bert in transformers), the checkpoint's is post-norm"
    return inexpressible(a)


def export_fields(a: Architecture) -> dict[str, Any]:
    """engine.json's "export"."""
    config_class, model_class = MEGATRON_BERT if a.family == "bert" else model_classes(a)
    ours = ("num_key_value_heads",) if a.family == "gpt" else ()  # asked for by DeepSpeed's Ulysses, unknown to GPT2Config
    keywords = {name: value for name, value in config_keywords(a).items() if name not in ours}
    return {"config_class": config_class, "model_class": model_class, "config": keywords}
