"""Parts beyond plain attention and an MLP as megatron-core's fields: published models by hand, and nothing that is said of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.engines.megatron_parts import CLAMPED, config_fields
from orchestrator.engines.passthrough import flags_of
from orchestrator.model.architecture import Architecture, Run
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.mlp import Mlp

PLAIN = Architecture(
    family="llama", name="x", num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, vocab_size=100,
    max_position_embeddings=128, activation="swiglu", normalization="RMSNorm", position_embedding="rope", add_bias_linear=False,
)  # fmt: skip
EXPERTS = Experts(num_experts=8, topk=2, ffn_hidden_size=32)
V3 = Experts(
    num_experts=256, topk=8, ffn_hidden_size=2048, shared_ffn_hidden_size=2048, score="sigmoid", scaling=2.5, groups=8, group_topk=4,
    expert_bias=True, aux_loss_coeff=1e-4,
)  # fmt: skip


def of_experts(experts: Experts) -> dict[str, Any]:
    return config_fields(replace(PLAIN, feed_forward=experts))


def flags(experts: Experts) -> list[tuple[str, ...]]:
    return flags_of(of_experts(experts), "0.16.1")


def windows(*sizes: int | None, **more: Any) -> Architecture:
    pattern = tuple(Run(mixer=GroupedQueryAttention(window=size, **more), feed_forward=Mlp(), layers=1) for size in sizes)
    return replace(PLAIN, num_layers=len(sizes), pattern=pattern)


def test_plain_layers_have_none() -> None:
    assert config_fields(PLAIN) == {}


def test_deepseek_v3s_router_is_its_paper_s() -> None:
    """arXiv 2412.19437, section 4.2: 256 experts of 2048, 8 a token out of 4 of 8 groups, one shared, bias moved by .001, alpha 1e-4."""
    assert of_experts(V3) == {
        "num_moe_experts": 256,
        "moe_router_topk": 8,
        "moe_ffn_hidden_size": 2048,
        "moe_layer_freq": 1,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
    }


def test_a_plain_router_has_no_more_than_it_needs() -> None:
    found = of_experts(EXPERTS)
    assert found["moe_router_load_balancing_type"] == "none"
    assert found["moe_router_pre_softmax"] is False, "of the chosen ones alone, which sums to one"
    assert of_experts(replace(EXPERTS, normalized=False))["moe_router_pre_softmax"] is True
    balanced = replace(EXPERTS, aux_loss_coeff=0.1)
    assert of_experts(balanced)["moe_router_load_balancing_type"] == "aux_loss"
    assert of_experts(replace(balanced, aux_loss_over="sequence"))["moe_router_load_balancing_type"] == "seq_aux_loss"
    assert of_experts(replace(balanced, aux_loss_over="global_batch"))["moe_router_load_balancing_type"] == "global_aux_loss"
    assert len(found) == 9


CHANGES: dict[str, Any] = {
    "num_experts": 16, "topk": 1, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 32, "score": "sigmoid", "normalized": False,
    "scaling": 2.0, "expert_bias": True, "aux_loss_coeff": 0.1, "capacity_factor": 1.25,
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_nothing_that_is_said_of_experts_is_lost(field: str) -> None:
    changed = replace(EXPERTS, **{field: CHANGES[field]})
    assert of_experts(changed) != of_experts(EXPERTS)
    assert flags(changed) != flags(EXPERTS)


@pytest.mark.parametrize(
    ("beside", "field", "value"),
    [
        ({"shared_ffn_hidden_size": 32}, "shared_gate", True),
        ({"capacity_factor": 1.0}, "pad_to_capacity", True),
        ({"groups": 4, "group_topk": 2}, "group_topk", 1),
        ({"expert_bias": True}, "bias_update_rate", 0.01),
    ],
)
def test_nor_what_is_said_of_a_part_of_them(beside: dict[str, Any], field: str, value: Any) -> None:
    base = replace(EXPERTS, **beside)
    assert of_experts(replace(base, **{field: value})) != of_experts(base)
    assert of_experts(base) != of_experts(EXPERTS)


def test_a_window_counts_the_tokens_before_and_is_skipped_where_a_layer_has_none() -> None:
    """GPT-OSS: 128 tokens with the own one, in every second layer, with sinks."""
    assert config_fields(windows(128, None, 128, None)) == {"window_size": [127, 0], "window_attn_skip_freq": [1, 0, 1, 0]}
    assert config_fields(windows(128, 128)) == {"window_size": [127, 0]}
    assert config_fields(windows(None, None, sinks=True)) == {"softmax_type": "learnable"}
    assert config_fields(windows(None, None, qk_norm="head")) == {"qk_layernorm": True}
    assert config_fields(replace(PLAIN, activation="clamped_swiglu")) == CLAMPED
    assert ("--window-attn-skip-freq", "([1]*1+[0]*1)") in flags_of(config_fields(windows(128, None)), "0.16.1")
    assert ("--window-size", "127,0") in flags_of(config_fields(windows(128, None)), "0.16.1")


def test_only_some_layers_have_experts() -> None:
    layers = tuple(Run(mixer=GroupedQueryAttention(), feed_forward=part, layers=2) for part in (Mlp(), EXPERTS))
    assert config_fields(replace(PLAIN, pattern=layers))["moe_layer_freq"] == [0, 0, 1, 1]


def test_latent_attention_has_its_ranks_widths_and_frequencies() -> None:
    mixer = LatentAttention(q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
    found = config_fields(replace(PLAIN, mixer=mixer))
    assert found == {
        "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 12,
        "qk_layernorm": True, "rope_type": "rope", "rotary_base": PLAIN.rotary_base, "rotary_percent": 1.0,
    }  # fmt: skip
    assert config_fields(replace(PLAIN, mtp_num_layers=1)) == {"mtp_num_layers": 1}
