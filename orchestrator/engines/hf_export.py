"""What transformers calls a model that was trained on megatron-core's layers: the class and config of an exported checkpoint."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.engines.hf_config import GPT2, class_of, config_keywords, model_classes
from orchestrator.model.spec import Architecture

MEGATRON_BERT: Final = ("MegatronBertConfig", "MegatronBertForMaskedLM")
"""transformers' classes of a pre-norm BERT, as megatron-core's is; BertForMaskedLM is post-norm."""


def export_fields(a: Architecture) -> dict[str, Any]:
    """The section "export" of engine.json: what the model's config.json in transformers has."""
    config_class, model_class = MEGATRON_BERT if a.stack == "encoder" else model_classes(a)
    ours = ("num_key_value_heads",) if class_of(a) is GPT2 else ()  # asked for by DeepSpeed's Ulysses, unknown to GPT2Config
    keywords = {name: value for name, value in config_keywords(a).items() if name not in ours}
    return {"config_class": config_class, "model_class": model_class, "config": keywords}
