"""Nemotron-H (arXiv 2504.03624), Nemotron Nano 2 (arXiv 2508.14444) and Nemotron 3 Nano (arXiv 2512.20848): layers of one part each:
Mamba-2, attention without positions, an MLP or experts, in the order of a string."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.families.decoder import pattern_of, router_groups
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing

KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of a pattern, as Megatron-core has them (ssm/mamba_hybrid_layer_allocation.py, Symbols)."""
NEWER = {"linear_attention": "mamba", "full_attention": "attention"}
"""What transformers 5 calls them in its lists."""
TIME_STEP_MIN = 1e-3


def kinds(config: HfConfig) -> Sequence[str]:
    """The kind of each layer, in order, from `hybrid_override_pattern` or from transformers 5's list. Raises InputError for a kind that is
    not known, or where the length is not `num_hidden_layers`."""
    listed = config.fields.get("layers_block_type", config.fields.get("layer_types"))
    pattern = config.fields.get("hybrid_override_pattern")
    key, given = ("layers_block_type", listed) if listed is not None else ("hybrid_override_pattern", pattern)
    if not isinstance(given, str | list | tuple) or not given:
        raise InputError(f"{config.key}.hybrid_override_pattern", repr(given), "must be a string of layers", KINDS)
    found = [NEWER.get(each, each) for each in given] if listed is not None else [KINDS.get(letter, letter) for letter in given]
    for kind in found:
        if kind not in KINDS.values():
            raise InputError(f"{config.key}.{key}", kind, "is no kind of layer", KINDS if listed is None else KINDS.values())
    count = config.optional_integer("num_hidden_layers")
    if count is not None and count != len(found):
        raise InputError(f"{config.key}.num_hidden_layers", count, f"is not the {len(found)} layers of {key}")
    return found


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of Nemotron-H or one of its followers."""
    config.choice("mlp_hidden_act", ("relu2",), "relu2")
    config.choice("mamba_hidden_act", ("silu",), "silu")
    for field in ("use_bias", "attention_bias", "mlp_bias", "mamba_proj_bias"):
        config.refuse_unless(field, False, "no published Nemotron-H has biases in its linears")
    config.refuse_unless("sliding_window", None, "no published Nemotron-H has windows")
    config.refuse_unless("moe_latent_size", None, "experts on a latent vector can't be planned")
    config.refuse_unless("n_shared_experts", 1, "transformers makes one MLP of the shared experts, whatever their number")
    config.refuse_unless("time_step_min", TIME_STEP_MIN, "published models have it")
    if config.number("num_nextn_predict_layers", 0):
        raise InputError(
            f"{config.key}.num_nextn_predict_layers",
            config.fields["num_nextn_predict_layers"],
            "prediction layers of several parts can't be planned; 0 leaves them out",
        )
    nothing = Nothing()
    mamba = Mamba2(
        num_heads=config.integer("mamba_num_heads", 128),
        head_dim=config.integer("mamba_head_dim", 64),
        state_size=config.integer("ssm_state_size", 128),
        num_groups=config.integer("n_groups", 8),
        conv_kernel=config.integer("conv_kernel", 4),
        conv_bias=config.flag("use_conv_bias", True),
        chunk_size=config.integer("chunk_size", 128),
    )
    made = {
        "mamba": Layer(mixer=mamba, feed_forward=nothing),
        "attention": Layer(mixer=GroupedQueryAttention(), feed_forward=nothing),
        "mlp": Layer(mixer=nothing, feed_forward=Mlp()),
    }
    order = kinds(config)
    if "moe" in order:
        made["moe"] = Layer(mixer=nothing, feed_forward=_experts(config))
    return Architecture(
        family="nemotron_h",
        name=name,
        num_layers=len(order),
        hidden_size=config.integer("hidden_size", 4096),
        num_attention_heads=config.integer("num_attention_heads", 32),
        num_query_groups=config.integer("num_key_value_heads", 8),
        kv_channels=config.optional_integer("head_dim") or config.integer("attention_head_dim", 128),
        ffn_hidden_size=config.integer("intermediate_size", 21504),
        vocab_size=config.integer("vocab_size", 131072),
        max_position_embeddings=config.integer("max_position_embeddings", 4096),
        activation="relu2",
        normalization="RMSNorm",
        norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        position_embedding="none",
        add_bias_linear=False,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        attention_dropout=config.number("attention_dropout", 0.0),
        hidden_dropout=config.number("hidden_dropout", 0.0),
        pattern=pattern_of([made[kind] for kind in order]),
    )


def _experts(config: HfConfig) -> Experts:
    """The experts of a Nemotron-H: routed as DeepSeek-V3's; an expert is an MLP without a gate."""
    return Experts(
        num_experts=config.integer("n_routed_experts", 8),
        topk=config.integer("num_experts_per_tok", 2),
        ffn_hidden_size=config.integer("moe_intermediate_size", 7688),
        shared_ffn_hidden_size=config.integer("moe_shared_expert_intermediate_size", 7688),
        score="sigmoid",
        normalized=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
        **router_groups(config),
        expert_bias=True,
    )


FAMILY = Family(name="nemotron_h", from_hf_config=from_hf_config, hf_model_types=("nemotron_h",))
