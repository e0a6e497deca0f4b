"""GPT-OSS (arXiv 2508.10925): windows in every second layer, sinks, experts with biases."""

from __future__ import annotations

from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.families.decoder import balance, decoder, pattern_of, windowed
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts

YARN = {"rope_type": "yarn", "factor": 32.0}
"""How transformers' GptOssConfig stretches its frequencies where a config.json says nothing."""


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of GPT-OSS's config.json. Raises InputError for what can't be expressed."""
    config.choice("hidden_act", ("silu",), "silu")
    config.refuse_unless("attention_bias", True, "GPT-OSS has biases on all linears")
    if config.section("rope_parameters") is None and config.section("rope_scaling") is None:
        config = HfConfig({**config.fields, "rope_parameters": {"rope_theta": 150_000, **YARN}}, config.key)
    window = config.integer("sliding_window", 128)
    experts = Experts(
        num_experts=config.integer("num_local_experts"),
        topk=config.integer("num_experts_per_tok", 4),
        ffn_hidden_size=config.integer("intermediate_size"),
        router_bias=True,
        **balance(config, 0.001),
    )
    layers = [
        Layer(mixer=GroupedQueryAttention(window=window if local else None, sinks=True), feed_forward=experts)
        for local in windowed(config, lambda index: index % 2 == 0)
    ]
    return decoder(
        config,
        "gpt_oss",
        name,
        groups=8,
        epsilon=1e-5,
        base=150_000,
        kv_channels=config.integer("head_dim", 64),
        activation="clamped_swiglu",
        add_bias_linear=True,
        pattern=pattern_of(layers),
    )


FAMILY = Family(name="gpt_oss", from_hf_config=from_hf_config, hf_model_types=("gpt_oss",))
