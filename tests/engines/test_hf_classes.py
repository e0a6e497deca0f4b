"""What keeps a model out of a class of transformers: each reason alone, on a model that the class has otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from test_hf_config import CONFIGS

from orchestrator.engines import ENGINES
from orchestrator.engines import hf_config as hf
from orchestrator.model.architecture import Architecture, Layer, Run
from orchestrator.model.families import from_hf_config
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing

CLASSES = {
    "gpt2": hf.GPT2, "llama": hf.LLAMA, "qwen2": hf.QWEN2, "qwen3": hf.QWEN3, "mistral": hf.MISTRAL, "phi3": hf.PHI3, "olmo2": hf.OLMO2,
    "gemma3": hf.GEMMA3, "mixtral": hf.MIXTRAL, "qwen3 of experts": hf.QWEN3_MOE, "glm": hf.GLM4_MOE, "deepseek": hf.DEEPSEEK_V3,
    "llama4": hf.LLAMA4, "mamba2": hf.MAMBA2, "nemotron": hf.NEMOTRON_H, "bert": hf.BERT, "t5": hf.T5,
}  # fmt: skip


def model(name: str) -> Architecture:
    kind, config = CONFIGS[name]
    return from_hf_config(config | {"model_type": kind}, "x")


Change = Callable[[Architecture], Architecture]


def said(**fields: Any) -> Change:
    """With these flat fields."""
    return lambda a: replace(a, **fields)


def parts(change: Callable[[Layer], Layer]) -> Change:
    """With each layer changed."""
    return lambda a: replace(a, pattern=tuple(Run(layers=1, **fields(change(layer))) for layer in a.each_layer()))


def fields(layer: Layer) -> dict[str, Any]:
    return {"mixer": layer.mixer, "feed_forward": layer.feed_forward}


def mixers(of: type = GroupedQueryAttention, when: Callable[[Any], bool] = lambda mixer: True, **fields: Any) -> Change:
    def one(layer: Layer) -> Layer:
        return replace(layer, mixer=replace(layer.mixer, **fields)) if isinstance(layer.mixer, of) and when(layer.mixer) else layer

    return parts(one)


def experts(**fields: Any) -> Change:
    def one(layer: Layer) -> Layer:
        return replace(layer, feed_forward=replace(layer.feed_forward, **fields)) if isinstance(layer.feed_forward, Experts) else layer

    return parts(one)


def layer(index: int, **fields: Any) -> Change:
    """With one layer's parts changed: fields of its mixer (`mixer=`) or another part."""

    def change(a: Architecture) -> Architecture:
        layers = list(a.each_layer())
        new = {name: replace(getattr(layers[index], name), **value) if isinstance(value, dict) else value for name, value in fields.items()}
        layers[index] = replace(layers[index], **new)
        return replace(a, pattern=tuple(Run(layers=1, mixer=one.mixer, feed_forward=one.feed_forward) for one in layers))

    return change


DROPOUT = (said(hidden_dropout=0.1), "hidden_dropout=0.1: transformers' X has attention dropout only")
BIAS = (said(add_bias_linear=True), "add_bias_linear=true add_qkv_bias=false: transformers' X has no biases")
QKV_BIAS = (said(add_qkv_bias=True), "add_bias_linear=false add_qkv_bias=true: transformers' X has no biases")
BARE = (DROPOUT, BIAS, QKV_BIAS)
SINGLE = (
    (said(hidden_dropout=0.1), "hidden_dropout=0.1: "),
    (said(add_bias_linear=True), "add_bias_linear=true add_qkv_bias=false: "),
)
SIGMOID = (
    (experts(score="softmax"), "experts.score=softmax: transformers' X has sigmoids with a bias"),
    (experts(expert_bias=False), "experts.score=sigmoid: transformers' X has sigmoids with a bias"),
    (experts(shared_ffn_hidden_size=0), "shared_ffn_hidden_size=0: transformers' X has shared experts as wide as the others"),
    (experts(shared_ffn_hidden_size=72), "shared_ffn_hidden_size=72: transformers' X has shared experts as wide as the others"),
    (experts(topk=3), None),
    (experts(groups=None, group_topk=None, topk=3), None),
    (experts(shared_ffn_hidden_size=48), None),
    (layer(2, feed_forward=Mlp()), None),
    (layer(3, feed_forward=Mlp()), "pattern: transformers' X has dense layers before those with experts only"),
    (said(add_bias_linear=True), "add_bias_linear=true: transformers' X has no biases but of Q, K and V"),
    (said(add_qkv_bias=True), None),
    DROPOUT,
)
REASONS: dict[str, tuple[tuple[Change, str | None], ...]] = {
    "gpt2": (
        (said(add_bias_linear=False), "add_bias_linear=false: the linears of transformers' X have biases"),
        (said(kv_channels=24), "kv_channels=24: transformers' X has heads of hidden_size/num_attention_heads"),
        (said(kv_channels=16), None),
        (said(num_query_groups=3), "num_query_groups=3: transformers' X has no grouped queries"),
        (said(num_query_groups=6), None),
        (said(hidden_dropout=0.4), None),
    ),
    "llama": (
        (said(add_bias_linear=True), None),
        (said(add_bias_linear=True, add_qkv_bias=True), None),
        (said(add_qkv_bias=True), "add_qkv_bias=true: transformers' X has biases on all linears or none"),
        DROPOUT,
    ),
    "qwen2": (
        (said(add_qkv_bias=False), "add_bias_linear=false add_qkv_bias=false: transformers' X has biases on Q, K and V only"),
        (said(add_bias_linear=True), "add_bias_linear=true add_qkv_bias=true: transformers' X has biases on Q, K and V only"),
        DROPOUT,
    ),
    "qwen3": (
        (mixers(qk_norm=None), "qk_norm=null: transformers' X norms queries and keys"),
        (mixers(qk_norm="hidden"), "qk_norm=null: transformers' X norms queries and keys"),
        (said(add_bias_linear=True), "add_bias_linear=true add_qkv_bias=false: our X has no biases"),
        (said(add_qkv_bias=True), "add_bias_linear=false add_qkv_bias=true: our X has no biases"),
        DROPOUT,
    ),
    "mistral": (
        (layer(1, mixer={"window": 128}), "pattern: transformers' X has the same window in all layers"),
        (layer(1, mixer={"window": None}), "pattern: transformers' X has the same window in all layers"),
        (mixers(window=128), None),
        *BARE,
    ),
    "phi3": ((layer(0, mixer={"window": None}), "pattern: transformers' X has the same window in all layers"), *BARE),
    "olmo2": (
        (mixers(qk_norm=None), "transformers' X is not without qk_norm_hidden"),
        (said(norm_placement="pre"), "transformers' X is not without post_norm"),
        *BARE,
    ),
    "gemma3": (
        (mixers(qk_norm=None), "transformers' X is not without qk_norm"),
        (said(norm_placement="pre"), "transformers' X is not without sandwich_norm"),
        (said(zero_centered_norm=False), "transformers' X is not without zero_centered_norm"),
        (said(embedding_scale=False), "transformers' X is not without embedding_scale"),
        *BARE,
        (mixers(window=None, rotary_base=None), "pattern: transformers' X has windows in some layers"),
        (mixers(when=lambda mixer: mixer.window is None, rotary_base=5), "pattern: transformers' X has two kinds of layers, "),
        (mixers(when=lambda mixer: mixer.window is None, rotary_base=30_000), None),
        (mixers(when=lambda mixer: mixer.window is not None, rotary_base=5), None),
        (layer(0, mixer={"window": 128}), "pattern: transformers' X has two kinds of layers, "),
        (mixers(when=lambda mixer: mixer.window is None, score_width=24.0), "score_width: transformers' X has one for all layers"),
        (mixers(score_width=30.5), "score_width=30.5: transformers' X takes an integer"),
        (mixers(score_width=31.0), None),
        (mixers(score_width=None), None),
        (mixers(rotary_scaled=True), None),
    ),
    "mixtral": (
        (experts(normalized=False), "experts.normalized=false: transformers' X makes scores sum to one"),
        (experts(scaling=2.5), "experts.scaling=2.5: transformers' X does not scale scores"),
        *BARE,
    ),
    "qwen3 of experts": (
        (experts(normalized=False), None),
        (experts(scaling=0.5), "experts.scaling=0.5: transformers' X does not scale scores"),
        (mixers(qk_norm=None), "qk_norm=null: transformers' X norms queries and keys"),
        (said(add_qkv_bias=True), "add_bias_linear=false add_qkv_bias=true: our X has no biases"),
        DROPOUT,
    ),
    "glm": SIGMOID,
    "deepseek": (*SIGMOID, (mixers(LatentAttention, q_lora_rank=None), None), (said(norm_epsilon=1e-5), None)),
    "llama4": (
        (experts(scores_on_input=False), "transformers' X is not without scores_on_input"),
        (experts(score="softmax"), "experts.score=softmax: transformers' X has sigmoids as they are"),
        (experts(normalized=True), "experts.score=sigmoid: transformers' X has sigmoids as they are"),
        (experts(scaling=2.0), "experts.score=sigmoid: transformers' X has sigmoids as they are"),
        (experts(expert_bias=True), "experts.score=sigmoid: transformers' X has sigmoids as they are"),
        (experts(shared_ffn_hidden_size=80), "shared_ffn_hidden_size=80: transformers' X has a shared expert as wide as the others"),
        (mixers(when=lambda mixer: mixer.rotary, temperature=(0.1, 8.0)), "pattern: transformers' X has one kind of layers "),
        (layer(0, mixer={"chunk": 32}), "pattern: transformers' X has one kind of layers with rotary=true, without temperature"),
        (layer(0, mixer={"qk_norm": None}), "pattern: transformers' X has one kind of layers with rotary=true, without temperature"),
        (layer(3, mixer={"chunk": 64}), "pattern: transformers' X has one kind of layers with rotary=false, without chunk and qk_norm"),
        (layer(3, mixer={"qk_norm": "l2"}), "pattern: transformers' X has one kind of layers with rotary=false, without chunk and qk_norm"),
        (mixers(when=lambda mixer: mixer.rotary, chunk=32), None),
        *BARE,
    ),
    "mamba2": (
        (layer(1, mixer={"chunk_size": 64}), "pattern: transformers' X has nothing but layers of one Mamba-2"),
        (mixers(Mamba2, head_dim=20), "hidden_size=96: transformers' X has 240 channels, a multiple of it"),
        (mixers(Mamba2, head_dim=24), None),
        *SINGLE,
    ),
    "nemotron": (
        (layer(0, mixer={"state_size": 64}), "pattern: transformers' X has one size of state space, and one of experts"),
        (layer(1, feed_forward={"topk": 2}), "pattern: transformers' X has one size of state space, and one of experts"),
        (layer(1, feed_forward=Mlp()), None),
        (layer(1, feed_forward=Mlp(ffn_hidden_size=80)), "mlp.ffn_hidden_size: transformers' X has one for all layers"),
        (experts(score="softmax"), "experts.score=softmax: transformers' X has sigmoids with a bias, and a shared expert"),
        (experts(expert_bias=False), "experts.score=sigmoid: transformers' X has sigmoids with a bias, and a shared expert"),
        (experts(shared_ffn_hidden_size=0), "experts.score=sigmoid: transformers' X has sigmoids with a bias, and a shared expert"),
        *SINGLE,
    ),
    "bert": (
        (said(add_bias_linear=False), "add_bias_linear=false: the linears of transformers' X have biases"),
        (said(kv_channels=24), "kv_channels=24: transformers' X has heads of hidden_size/num_attention_heads"),
        (said(num_query_groups=2), "num_query_groups=2: transformers' X has no grouped queries"),
    ),
    "t5": (
        (said(add_bias_linear=True), "add_bias_linear=true: the linears of transformers' X have no biases"),
        (said(num_query_groups=2), "num_query_groups=2: transformers' X has no grouped queries"),
        (said(hidden_dropout=0.1), "hidden_dropout=0.1 attention_dropout=0.3: transformers' X has one dropout rate"),
        (said(hidden_dropout=0.1, attention_dropout=0.1), None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_alone_keeps_a_model_out_of_its_class_in_its_words(name: str) -> None:
    base, found = model(name), CLASSES[name]
    assert hf.class_of(base) is found
    assert found.complaints(base, "X") == []
    for number, (change, why) in enumerate(REASONS[name]):
        complaints = found.complaints(change(base), "X")
        assert len(complaints) == (why is not None), (number, why, complaints)
        assert why is None or complaints[0].startswith(why), (number, complaints)


def test_a_model_that_no_class_has_is_refused_in_the_words_of_its_own() -> None:
    """Not of the first class that lacks as little: Moonlight's queries of full rank were said to be none of Glm4MoeForCausalLM."""
    plain = mixers(LatentAttention, q_lora_rank=None)(model("deepseek"))
    assert hf.class_of(plain) is hf.DEEPSEEK_V3
    assert hf.inexpressible(plain) is None
    wrong = experts(score="softmax")(plain)
    assert hf.inexpressible(wrong) == "experts.score=softmax: transformers' DeepseekV3ForCausalLM has sigmoids with a bias"


def test_norms_of_latent_vectors_have_an_epsilon_of_their_own_in_transformers_alone() -> None:
    latent = model("deepseek")
    assert ENGINES["megatron"].why_no_exchange(latent, "deepseek_v3") is None
    moonlights = replace(latent, norm_epsilon=1e-5)
    assert ENGINES["deepspeed"].why_no_exchange(moonlights, "deepseek_v3") is None
    said = "norm_epsilon=1e-05: transformers' DeepseekV3ForCausalLM has 1e-06 in the norms of latent vectors"
    assert str(ENGINES["megatron"].why_no_exchange(moonlights, "deepseek_v3")).startswith(said)


@pytest.mark.parametrize(("topk", "by"), [(4, None), (2, 1), (6, 3)])
def test_groups_of_experts_are_valued_by_two_in_transformers_alone(topk: int, by: int | None) -> None:
    """modeling_deepseek_v3.py, route_tokens_to_experts; moe_utils.py, group_limited_topk. DeepSpeed's AutoEP has two as well."""
    grouped = experts(num_experts=16, groups=4, group_topk=2, topk=topk)(model("deepseek"))
    assert hf.inexpressible(grouped) is ENGINES["deepspeed"].why_no_exchange(grouped, "deepseek_v3") is None
    why = ENGINES["megatron"].why_no_exchange(grouped, "deepseek_v3")
    said = f"experts.topk={topk}: transformers' DeepseekV3ForCausalLM values a group by its 2 best experts, megatron-core by its {by}; "
    assert why is None if by is None else str(why).startswith(said)


def test_layers_of_both_parts_are_of_neither_model_of_single_parts() -> None:
    both = layer(0, feed_forward=Mlp())
    assert any("nothing but layers of one Mamba-2" in why for why in hf.MAMBA2.complaints(both(model("mamba2")), "X"))
    assert any("has layers of one part" in why for why in hf.NEMOTRON_H.complaints(both(model("nemotron")), "X"))
    attention = layer(0, mixer=GroupedQueryAttention(), feed_forward=Nothing())
    assert any("nothing but layers of one Mamba-2" in why for why in hf.MAMBA2.complaints(attention(model("mamba2")), "X"))


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_class_is_made_of_is_held_against_its_tables(name: str) -> None:
    base, found = model(name), CLASSES[name]
    assert hf.inexpressible(base) is None
    assert hf.model_classes(base) == (found.config, found.model)
    wrong = {"LayerNorm": "RMSNorm", "RMSNorm": "LayerNorm"}[found.normalization]
    position = "rope" if name in ("bert", "t5") else "relative"
    for key, value in (("normalization", wrong), ("activation", "clamped_swiglu"), ("position_embedding", position)):
        changed = replace(base, **{key: value})
        assert f"{key}={value}: transformers' " in " ".join(hf._complaints(changed, found)), key
        assert hf.inexpressible(changed) is not None
    stretched = replace(base, rope_scaling_factor=4.0, rope_scaling_type="llama3")
    reasons = hf._complaints(stretched, found)
    if found.position_embedding == "rope":
        assert not any("no rotary positions" in why for why in reasons)
    else:
        assert reasons == [f"rope_scaling_factor=4.0: transformers' {found.model} has no rotary positions"]
