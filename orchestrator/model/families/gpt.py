"""GPT-2, GPT-3 and their like: a decoder with learned positions (megatron-core's GPTModel)."""

from __future__ import annotations

from typing import Final, get_args

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.shared import GATED, Activation

GELU_NAMES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
"""Hugging Face's names for GELU and its tanh approximation: one cost."""
UNGATED: Final = tuple(name for name in get_args(Activation) if name not in (*GATED, *GELU_NAMES))
"""The other activations without a gate, which Hugging Face calls as we do (transformers/activations.py, ACT2FN)."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of GPT-2's config.json. Raises InputError for what can't be expressed."""
    config.refuse_unless("add_cross_attention", False, "the gpt family has no cross-attention")
    config.refuse_unless("scale_attn_by_inverse_layer_idx", False, "the gpt family scales every layer's scores alike")
    hidden_size = config.integer("n_embd")
    hidden_dropout = config.number("resid_pdrop", 0.1)
    config.refuse_unless("embd_pdrop", hidden_dropout, "the embedding's dropout must be resid_pdrop")
    activation = config.choice("activation_function", (*GELU_NAMES, *UNGATED), "gelu_new")
    return Architecture(
        family="gpt",
        name=name,
        num_layers=config.integer("n_layer"),
        hidden_size=hidden_size,
        num_attention_heads=config.integer("n_head"),
        ffn_hidden_size=config.optional_integer("n_inner") or 4 * hidden_size,
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("n_positions"),
        activation="gelu" if activation in GELU_NAMES else activation,
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        hidden_dropout=hidden_dropout,
        attention_dropout=config.number("attn_pdrop", 0.1),
    )


FAMILY = Family(
    name="gpt",
    from_hf_config=from_hf_config,
    hf_model_types=("gpt2",),
    choices={"position_embedding": ("learned_absolute", "rope", "none"), "num_token_types": (0,)},
)
