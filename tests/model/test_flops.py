"""Model FLOPs against Megatron's own count and the papers."""

from __future__ import annotations

import pytest
from llama import LLAMA3_8B
from msgspec.structs import replace
from test_recipes import load

from orchestrator.model.families import describe
from orchestrator.model.flops import forward_flops, model_flops_per_sample
from orchestrator.model.spec import Architecture

LLAMA2_7B = replace(LLAMA3_8B, num_query_groups=32, ffn_hidden_size=11008, vocab_size=32000)
LLAMA3_70B = replace(LLAMA3_8B, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672)


def gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int) -> Architecture:
    return Architecture(
        family="gpt",
        name="gpt",
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=vocab,
        max_position_embeddings=seq,
    )


def test_llama3_8b_at_8192_is_51_47_gflop_per_token() -> None:
    """Printed by Megatron's num_floating_point_operations (training.py:220) for this model."""
    spec = describe(LLAMA3_8B, 8192)
    assert round(model_flops_per_sample(spec) / 8192 / 1e9, 2) == 51.47


@pytest.mark.parametrize(("a", "seq"), [(LLAMA3_8B, 8192), (LLAMA2_7B, 4096), (LLAMA3_70B, 4096)])
def test_a_decoder_has_megatrons_count(a: Architecture, seq: int) -> None:
    """The formula of training.py:220: 6 per weight and token in MLP, attention and logits, causal scores at half."""
    h, q, kv = a.hidden_size, a.num_attention_heads * a.head_dim, a.query_groups * a.head_dim
    per_token = 6 * a.num_layers * (3 * h * a.ffn_hidden_size + h * (q + 2 * kv) + q * h + seq * q) + 6 * h * a.vocab_size
    assert model_flops_per_sample(describe(a, seq)) == seq * per_token


@pytest.mark.parametrize(("layers", "hidden", "heads", "vocab", "seq"), [(96, 12288, 96, 51200, 2048), (128, 25600, 160, 51200, 2048)])
def test_a_gpt_with_full_attention_has_narayanans_count(layers: int, hidden: int, heads: int, vocab: int, seq: int) -> None:
    """72 B s L h^2 (1 + s/6h + V/12Lh): arXiv 2104.04473, section 5.1, without its recompute, which has 96 and V/16Lh."""
    spec = describe(gpt(layers, hidden, heads, vocab, seq), seq)
    causal_half = 6 * layers * seq * seq * hidden
    narayanan = 72 * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model_flops_per_sample(spec) + causal_half == pytest.approx(narayanan, rel=1e-12)


def test_latent_attention_experts_and_prediction_have_megatrons_count() -> None:
    """Of DeepSeek-V3, the formula of training.py:354-600 without what it counts of norms (q_lora_rank and kv_lora_rank a layer, 3 h a
    prediction), and with the routers, which it leaves out."""
    a, _, _ = load("deepseek_v3")
    seq = 4096
    h, heads, f, experts, topk, layers, dense = 7168, 128, 2048, 256, 8, 61, 3
    q_lora, kv_lora, nope, rope, v = 1536, 512, 128, 64, 128
    attention = (
        q_lora * (h + heads * (nope + rope)) + kv_lora * (h + heads * (nope + v)) + h * rope + heads * v * h
        + seq * heads * (nope + rope + v) / 2
    )  # fmt: skip
    feed_forward = 3 * h * (18432 * dense + (topk * f + f) * (layers + 1 - dense)) + h * experts * (layers + 1 - dense)
    ends = 2 * h * h + 2 * h * 129280
    assert model_flops_per_sample(describe(a, seq)) == pytest.approx(6 * seq * ((layers + 1) * attention + feed_forward + ends), rel=1e-12)


def test_longer_sequences_cost_more_per_token() -> None:
    per_token = [forward_flops(describe(LLAMA3_8B, s).kind("decoder")) / s for s in (1024, 4096, 8192)]
    assert per_token == sorted(per_token)
