"""BERT as Megatron trains it: pre-norm encoder, segment embeddings, language-model head with a dense layer of its own.

Against Hugging Face's post-norm BertForMaskedLM the total is the same: its embedding norm has the size of our final norm. The
binary (next-sentence) head and its pooler are not built (`--bert-no-binary-head`).
"""

from __future__ import annotations

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.gpt import GELU_NAMES
from orchestrator.model.families.hf import Family, HfConfig


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of BERT's config.json. Raises InputError for what can't be expressed."""
    config.choice("hidden_act", GELU_NAMES, "gelu")
    config.choice("position_embedding_type", ("absolute",), "absolute")
    config.refuse_unless("is_decoder", False, "the bert family is an encoder")
    return Architecture(
        family="bert",
        name=name,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=config.integer("hidden_size"),
        num_attention_heads=config.integer("num_attention_heads"),
        ffn_hidden_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        num_token_types=config.integer("type_vocab_size", 2),
        norm_epsilon=config.number("layer_norm_eps", 1e-12),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        hidden_dropout=config.number("hidden_dropout_prob", 0.1),
        attention_dropout=config.number("attention_probs_dropout_prob", 0.1),
    )


FAMILY = Family(
    name="bert",
    from_hf_config=from_hf_config,
    hf_model_types=("bert", "megatron-bert"),
    choices={"position_embedding": ("learned_absolute", "rope"), "activation": ("gelu",)},
)
