"""T5: encoder and decoder with cross-attention (megatron-core's T5Model).

One token table serves both sides. T5Model norms the encoder's output in the block that has `post_process`, so both final norms are the
head's. Where the head is tied it has an output bias in megatron-core (t5_model.py:62) that Hugging Face's T5 has not: its total is
ours less `vocab_size`.
"""

from __future__ import annotations

from typing import Final

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.ends import RELATIVE_BUCKETS, RELATIVE_MAX_DISTANCE

PRETRAINING_LENGTH: Final = 512
"""Tokens that T5 was trained on (section 3.1.2); its config.json has no length, relative positions have no limit."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of T5: v1.0 (relu, tied) or v1.1 and mT5 (gated-gelu, untied)."""
    config.refuse_unless("relative_attention_num_buckets", RELATIVE_BUCKETS, "the t5 family has as many buckets as the paper")
    config.refuse_unless("relative_attention_max_distance", RELATIVE_MAX_DISTANCE, "the t5 family has the paper's distance")
    dropout = config.number("dropout_rate", 0.1)
    num_layers = config.integer("num_layers")
    usual = "gated-gelu" if config.fields.get("model_type") == "mt5" else "relu"
    activation = config.choice("feed_forward_proj", ("relu", "gated-gelu"), usual)
    return Architecture(
        family="t5",
        name=name,
        num_layers=num_layers,
        decoder_num_layers=config.optional_integer("num_decoder_layers") or num_layers,
        hidden_size=config.integer("d_model"),
        num_attention_heads=config.integer("num_heads"),
        kv_channels=config.integer("d_kv"),
        ffn_hidden_size=config.integer("d_ff"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("n_positions", PRETRAINING_LENGTH),
        activation="geglu" if activation == "gated-gelu" else "relu",
        normalization="RMSNorm",
        norm_epsilon=config.number("layer_norm_epsilon", 1e-6),
        position_embedding="relative",
        add_bias_linear=False,
        tie_embeddings=config.flag("tie_word_embeddings", True),
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


FAMILY = Family(
    name="t5",
    from_hf_config=from_hf_config,
    hf_model_types=("t5", "mt5"),
    choices={"position_embedding": ("learned_absolute", "relative", "rope"), "num_token_types": (0,)},
)
