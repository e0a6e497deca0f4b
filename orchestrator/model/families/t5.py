"""T5: encoder and decoder with cross-attention (megatron-core's T5Model).

One token table serves both sides. T5Model norms the encoder's output in the block that has `post_process`, so both final norms are the
head's. Where the head is tied it has an output bias in megatron-core (t5_model.py:62) that Hugging Face's T5 has not: its total is
ours less `vocab_size`.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from orchestrator.model.families.blocks import Part, embedding, head, norm, transformer_layer, vocabulary_head
from orchestrator.model.families.family import Family
from orchestrator.model.families.hf import HfConfig
from orchestrator.model.spec import Architecture, Edge, LayerRun, LayerSpec, ModelSpec, Pointwise, Saved, Weight

RELATIVE_BUCKETS: Final = 32
RELATIVE_MAX_DISTANCE: Final = 128
"""Of the relative attention bias: Raffel et al. (arXiv 1910.10683), section 2.1, and the defaults of mcore's T5Model."""
PRETRAINING_LENGTH: Final = 512
"""Tokens that T5 was trained on (section 3.1.2); its config.json has no length, relative positions have no limit."""


def embed_both_sides(a: Architecture, seq_length: int, decoder_seq_length: int) -> LayerSpec:
    """The embedding of encoder and decoder tokens; with relative positions, the two bias tables that all layers of a side share."""
    spec = embedding(a, seq_length + decoder_seq_length, output_tokens=seq_length)
    if a.position_embedding != "relative":
        return spec
    tables = tuple(
        Weight(
            name=f"{side}_relative_pos_emb.relative_attention_bias.weight",
            shape=(RELATIVE_BUCKETS, a.num_attention_heads),
            kind="embedding",
        )
        for side in ("encoder", "decoder")
    )
    return replace(spec, weights=spec.weights + tables)


def encoder_output(a: Architecture, seq_length: int) -> Part:
    """The encoder's final norm. Its output is kept once, as the input of every decoder layer's keys and values."""
    weights, ops = norm("encoder.final_layernorm", a, seq_length)
    kept = Saved(name="encoder_output", elements=seq_length * a.hidden_size, group="residual")
    return Part(weights, (*ops, Pointwise(name="encoder_output", elements=0, moved=0.0, saves=(kept,))))


def describe(a: Architecture, seq_length: int, decoder_seq_length: int | None = None) -> ModelSpec:
    """Embedding, encoder layers, decoder layers, head. The encoder's output rides along to every decoder layer."""
    assert decoder_seq_length is not None  # families.describe refuses it
    decoder = transformer_layer("decoder", a, decoder_seq_length, causal=True, context_tokens=seq_length)
    return ModelSpec(
        architecture=a,
        seq_length=seq_length,
        decoder_seq_length=decoder_seq_length,
        runs=(
            LayerRun(layer=embed_both_sides(a, seq_length, decoder_seq_length), count=1),
            LayerRun(layer=transformer_layer("encoder", a, seq_length, causal=False), count=a.num_layers),
            LayerRun(layer=decoder, count=a.decoder_num_layers),
            LayerRun(
                layer=head(
                    a,
                    decoder_seq_length,
                    encoder_output(a, seq_length),
                    norm("decoder.final_layernorm", a, decoder_seq_length),
                    vocabulary_head(a, decoder_seq_length, prefix="lm_head.output_layer", bias=a.tie_embeddings),
                ),
                count=1,
            ),
        ),
        edges=(Edge(name="encoder_output", source="encoder", target="decoder", elements=seq_length * a.hidden_size),),
    )


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """A config.json of T5: v1.0 (relu, tied) or v1.1 and mT5 (gated-gelu, untied)."""
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
    describe=describe,
    from_hf_config=from_hf_config,
    hf_model_types=("t5", "mt5"),
    choices={"position_embedding": ("learned_absolute", "relative", "rope"), "num_token_types": (0,)},
    has_decoder=True,
)
