"""Llama 3 8B, by hand."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture

LLAMA3_8B = Architecture(
    family="llama",
    name="llama3_8b",
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
    activation="swiglu",
    normalization="RMSNorm",
    position_embedding="rope",
    add_bias_linear=False,
    tie_embeddings=False,
)
