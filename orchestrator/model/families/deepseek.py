"""DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534): latent attention, experts, a shared one."""

from __future__ import annotations

from typing import Any

from orchestrator.model.architecture import Architecture
from orchestrator.model.families.decoder import decoder, first_dense, router_groups
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.experts import USUALLY_OVER, Experts
from orchestrator.model.parts.latent_attention import LatentAttention


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of DeepSeek-V2, DeepSeek-V3, or a Kimi K2."""
    config.refuse_unless("moe_layer_freq", 1, "every layer after the first dense ones has experts")
    second = config.fields.get("model_type") == "deepseek_v2"
    mixer = LatentAttention(
        q_lora_rank=config.optional_integer("q_lora_rank", 1536),
        kv_lora_rank=config.integer("kv_lora_rank"),
        qk_head_dim=config.integer("qk_nope_head_dim"),
        qk_rope_head_dim=config.integer("qk_rope_head_dim"),
        v_head_dim=config.integer("v_head_dim"),
        **_yarn(config),
    )
    width = config.integer("moe_intermediate_size")
    experts = Experts(
        num_experts=config.integer("n_routed_experts"),
        topk=config.integer("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=width * (config.optional_integer("n_shared_experts", 2 if second else 1) or 0),
        score="softmax" if second else "sigmoid",
        normalized=config.flag("norm_topk_prob", not second),
        scaling=config.number("routed_scaling_factor", 1.0 if second else 2.5),
        **router_groups(config, None if second else 8, None if second else 4),
        expert_bias=not second,
        **_balance(config, second),
    )
    return decoder(
        config,
        "deepseek",
        name,
        num_query_groups=None,
        kv_channels=None if config.integer("hidden_size") % config.integer("num_attention_heads") == 0 else mixer.v_head_dim,
        pattern=first_dense(config, mixer, experts, 0 if second else 3),
        mtp_num_layers=int(config.number("num_nextn_predict_layers", 0)),
    )


def _balance(config: HfConfig, second: bool) -> dict[str, Any]:
    """Fields of Experts, from `aux_loss_alpha` and `seq_aux`, which DeepSeek's own code has and transformers' classes keep unread. A
    DeepSeek-V2 that does not say them has those of its class there (configuration_deepseek.py): nothing else balances a softmax."""
    coefficient = config.number("aux_loss_alpha", DEEPSEEK_V2_ALPHA if second else 0.0)
    over = "sequence" if config.flag("seq_aux", True) else "micro_batch"
    usual = USUALLY_OVER["softmax" if second else "sigmoid"]
    return {"aux_loss_coeff": coefficient, "aux_loss_over": None if over == usual else over} if coefficient else {}


def _yarn(config: HfConfig) -> dict[str, float | None]:
    """Fields of LatentAttention, where frequencies are stretched as YARN says; {}: they are not, or otherwise (Kimi K2's betas are 1)."""
    section = config.section("rope_parameters") or config.section("rope_scaling")
    if section is None or "yarn" not in (section.fields.get("type"), section.fields.get("rope_type")):
        return {}
    if any(section.number(name, default) != expected for name, (default, expected) in YARN.items()):
        return {}
    mscale, all_dim = section.number("mscale", 1.0), section.number("mscale_all_dim", 0.0)
    # modeling_rope_utils.py: without both, cosine and sine grow as with a mscale of 1.
    return {"yarn_mscale": mscale, "yarn_mscale_all_dim": all_dim or None} if all_dim or mscale == 1.0 else {}


DEEPSEEK_V2_ALPHA = 0.001
"""`aux_loss_alpha` of DeepSeek-V2's own class."""
YARN = {"original_max_position_embeddings": (0.0, 4096.0), "beta_fast": (32.0, 32.0), "beta_slow": (1.0, 1.0)}
"""Fields of YaRN: (what each is where a config.json is silent, what it must be), which Megatron-core's latent attention has by itself
(MLATransformerConfig) and its command line of 0.16 can't change."""

FAMILY = Family(name="deepseek", from_hf_config=from_hf_config, hf_model_types=("deepseek_v2", "deepseek_v3", "kimi_k2"))
