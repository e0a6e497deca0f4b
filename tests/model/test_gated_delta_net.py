"""Qwen3-Next and Qwen3.5: which layers their configurations make, what a gated delta net has, keeps and computes, and what is refused."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from published_counts import PUBLISHED, QWEN35_WHOLE

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families import describe, from_hf_config, has_reader
from orchestrator.model.flops import forward_flops, model_flops_per_sample
from orchestrator.model.layer import LayerSpec
from orchestrator.model.ops import Attention, DeltaRule, Gemm, Pointwise
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet

NEXT, MOE, DENSE = (PUBLISHED[name][0] for name in ("Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "Qwen3.5-27B"))
TINY: dict[str, Any] = MOE | {
    **{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 128, "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16},
}


def layer_of(config: dict[str, Any], kind: str, tokens: int = 1024) -> LayerSpec:
    return describe(from_hf_config(config, "x"), tokens).kind(kind)


def test_three_of_four_layers_have_a_gated_delta_net() -> None:
    a = from_hf_config(NEXT, "x")
    layers = list(a.each_layer())
    assert [isinstance(layer.mixer, GatedDeltaNet) for layer in layers] == [True, True, True, False] * 12
    assert {layer.mixer for layer in layers[3::4]} == {GroupedQueryAttention(qk_norm="head", output_gate=True)}
    assert [run.layer.kind for run in describe(a, 1024).runs[1:3]] == ["delta_experts_decoder", "experts_decoder"]
    assert {*a.features()} >= {"gated_delta_net", "output_gate", "zero_centered_norm", "partial_rotary", "shared_expert_gate"}


def test_kinds_listed_and_kinds_by_interval_are_the_same_model() -> None:
    listed = [("full" if index % 4 == 3 else "linear") + "_attention" for index in range(48)]
    assert from_hf_config(NEXT | {"layer_types": listed}, "x") == from_hf_config(NEXT | {"full_attention_interval": 4}, "x")


def test_a_multimodal_qwen35_is_its_text_and_its_tower() -> None:
    whole = {"model_type": "qwen3_5_moe", "text_config": MOE, "vision_config": {"depth": 27, "out_hidden_size": MOE["hidden_size"]}}
    assert replace(from_hf_config(whole, "x"), vision=None) == from_hf_config(MOE, "x")
    assert "vision" in from_hf_config(whole, "x").features()
    assert has_reader(whole | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]})
    assert from_hf_config(whole | {"tie_word_embeddings": True}, "x").tie_embeddings


def test_positions_in_three_sections_rotate_a_quarter_of_each_head() -> None:
    section = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    a = from_hf_config(MOE | {"rope_parameters": section | {"mrope_interleaved": True}}, "x")
    assert (a.rotary_base, a.rotary_percent, a.rope_scaling_factor) == (10_000_000, 0.25, None)


@pytest.mark.parametrize("name", QWEN35_WHOLE)
def test_text_vision_and_prediction_layer_are_the_checkpoint(name: str) -> None:
    config, text = PUBLISHED[name]
    whole, vision = QWEN35_WHOLE[name]
    parameters = describe(from_hf_config(config | {"mtp_num_hidden_layers": 1}, "x"), 1024).parameters
    assert parameters + vision == whole
    assert parameters > (text or 0) == describe(from_hf_config(config, "x"), 1024).parameters


def test_the_rule_is_an_eighth_of_full_attention_at_4096_tokens_as_megatron_counts_both() -> None:
    """training.py:494: 8 x 128 x 128 a head of values and token, of 32; attention sees 2,048 tokens in the mean, 4 x 256 a head of 16."""
    rules, attention = (
        [op for op in layer_of(MOE, kind, 4096).ops if isinstance(op, DeltaRule | Attention)]
        for kind in ("delta_experts_decoder", "experts_decoder")
    )
    assert [op.model_flops for op in rules if isinstance(op, DeltaRule)] == [4096 * 32 * 8 * 128 * 128]
    assert [4 * op.query_len * op.key_len * op.heads * op.head_dim * op.visible for op in attention if isinstance(op, Attention)] == [
        4096 * 16 * 4 * 256 * 2048
    ]


def test_flops_are_those_that_bridge_prints() -> None:
    """Qwen3.5-35B-A3B with its prediction layer at 4,096 tokens: 285.18 TFLOP/s on 16 GPUs, 1,024 samples in 20.6564 s."""
    model = describe(from_hf_config(MOE | {"mtp_num_hidden_layers": 1}, "x"), 4096)
    assert model_flops_per_sample(model) == pytest.approx(285.18e12 * 16 * 20.6564 / 1024, rel=0.01)


def test_a_longer_sequence_costs_a_delta_net_in_proportion() -> None:
    once, twice = (layer_of(MOE, "delta_experts_decoder", tokens) for tokens in (4096, 8192))
    assert forward_flops(twice) == 2 * forward_flops(once)
    assert twice.saved_bytes() == 2 * once.saved_bytes()


def test_a_gate_doubles_the_queries_projection_and_keeps_two_tensors_more() -> None:
    plain = replace(from_hf_config(MOE, "x"), pattern=(), mixer=GroupedQueryAttention(qk_norm="head"))
    gated = replace(plain, mixer=GroupedQueryAttention(qk_norm="head", output_gate=True))
    without, within = (describe(a, 1024).kind("decoder") for a in (plain, gated))
    queries = 16 * 256
    assert within.parameters - without.parameters == 2048 * queries
    assert forward_flops(within) - forward_flops(without) == 2 * 1024 * 2048 * queries
    assert within.saved_bytes() - without.saved_bytes() == 2 * 2 * 1024 * queries
    assert within.saved_bytes(4) - without.saved_bytes(4) == 2 * 2 * 1024 * queries / 4


def test_tensor_parallel_ranks_have_their_heads_and_the_norm_whole() -> None:
    """Megatron-core, ssm/gated_delta_net.py: all but out_norm is divided."""
    mixer = [weight for weight in layer_of(MOE, "delta_experts_decoder").weights if weight.name.startswith("self_attention.")]
    shapes = {weight.name.removeprefix("self_attention."): weight.local_shape(4) for weight in mixer}
    assert shapes == {
        "in_proj.weight": (12352 // 4, 2048),
        "conv1d.weight": (8192 // 4, 1, 4),
        "dt_bias": (8,),
        "A_log": (8,),
        "out_norm.weight": (128,),
        "out_proj.weight": (2048, 1024),
    }


def test_queries_and_keys_are_repeated_only_where_values_have_more_heads() -> None:
    alike = layer_of(MOE | {"linear_num_key_heads": 32}, "delta_experts_decoder")
    names = [[op.name for op in layer.ops if isinstance(op, Pointwise)] for layer in (alike, layer_of(MOE, "delta_experts_decoder"))]
    assert ["self_attention.repeat" in found for found in names] == [False, True]


def test_an_architecture_with_delta_nets_is_written_and_read_without_loss() -> None:
    for config in (NEXT, MOE, DENSE):
        a = from_hf_config(config, "x")
        assert msgspec.json.decode(msgspec.json.encode(a), type=Architecture) == a


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NEXT | {"layer_types": ["linear_attention"] * 3}, "must be a list of 48 kinds of layers; choose one of linear_attention, full_"),
        (NEXT | {"layer_types": ["sliding_attention"] * 48}, "must be a list of 48 kinds of layers"),
        (NEXT | {"mlp_only_layers": [0]}, "mlp_only_layers=[0]: every layer of a published model has the same feed-forward"),
        (NEXT | {"attn_output_gate": False}, "attn_output_gate=False: every published model has gates; only True"),
        (NEXT | {"linear_num_key_heads": 5}, "gated_delta_net.num_key_heads=5: does not divide num_value_heads=32"),
        (MOE | {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True: prediction layers share the embedding"),
        ({"model_type": "qwen3_5_moe", "vision_config": {}}, "text_config: is missing: a qwen3_5_moe has one"),
    ],
)
def test_what_can_not_be_expressed_is_refused_by_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        from_hf_config(config, "x")
    assert message in str(raised.value)


@pytest.mark.engines
@pytest.mark.parametrize("config", [NEXT, MOE, TINY], ids=["next", "moe", "tiny"])
def test_each_part_has_the_parameters_of_transformers_modules(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | {"num_hidden_layers": 4}))
    for index, kind, theirs in ((0, "delta_experts_decoder", "linear_attn"), (3, "experts_decoder", "self_attn")):
        module, layer = model.model.layers[index], layer_of(config, kind)
        for prefix, part in (("self_attention.", getattr(module, theirs)), ("mlp.", module.mlp)):
            ours = sum(prod(weight.shape) for weight in layer.weights if weight.name.startswith(prefix))
            assert ours == sum(parameter.numel() for parameter in part.parameters()), (kind, prefix)


@pytest.mark.engines
@pytest.mark.parametrize("chunk", [16, 64])
def test_megatrons_own_rule_in_torch_computes_what_is_said_of_its_products(chunk: int) -> None:
    """Forward but for the triangle, which it solves row by row without a product; backward's gradients of those products."""
    import torch
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
    from torch.utils.flop_counter import FlopCounterMode

    tokens, heads, keys, values = 128, 3, 24, 16
    rule = DeltaRule(name="d", tokens=tokens, heads=heads, key_dim=keys, value_dim=values, chunk=chunk)
    given = [torch.randn(1, tokens, heads, width, requires_grad=True) for width in (keys, keys, values)]
    steps = [torch.rand(1, tokens, heads, requires_grad=True) for _ in range(2)]
    with FlopCounterMode(display=False) as counter:
        output, _ = torch_chunk_gated_delta_rule(*given, g=-steps[0], beta=steps[1], chunk_size=chunk)
    inverse = rule.products[2]
    assert counter.get_total_flops() == sum(rule.products) - inverse
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    # Nothing enters the first chunk's state, and nothing leaves the last one's: their gradients are not asked for.
    a_state = 2 * heads * chunk * keys * values
    assert 2 * (sum(rule.products) - inverse) - 4 * a_state <= counter.get_total_flops() <= 2 * (sum(rule.products) - inverse)


@pytest.mark.engines
def test_the_projection_is_as_wide_as_transformers_two() -> None:
    import torch
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    given = {name: value for name, value in NEXT.items() if name != "model_type"}
    with torch.device("meta"):
        module = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**given), 0)
    (projection,) = (op for op in layer_of(NEXT, "delta_experts_decoder").ops if isinstance(op, Gemm) and op.name.endswith("in_proj"))
    assert projection.n == module.in_proj_qkvz.out_features + module.in_proj_ba.out_features
