"""Which parts of models megatron-core 0.16.1's layers have and our workers train, in the words of `Architecture.features`; and how a part
is said in TransformerConfig's words and in Megatron-LM's flags."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from orchestrator.engines.megatron_versions import release_of
from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.words import megatron as words
from orchestrator.words.terms import say

TRAINED: Final = ("attention", "mlp", "llama3_rope", "encoder", "encoder_decoder", "relative_bias", "qk_norm", "partial_rotary")
"""Parts that our worker trains under every engine on megatron-core's layers, each with a test of parity against one process
(tests/workers)."""

OWN_LOOP: Final = (
    *("experts", "shared_experts", "shared_expert_gate", "sigmoid_router", "grouped_router", "expert_bias"),
    *("latent_attention", "full_rank_queries", "latent_yarn", "mtp", "window", "sinks", "clamped_swiglu"),
    *("router_bias", "expert_mlp_bias"),
)
"""Parts that our worker trains under megatron-core's own training loop alone, each with a test of parity: DeepSpeed reduces all gradients
over one group, and no case trains latent attention, multi-token prediction, windows or sinks there."""

SIGMOID_BALANCE: Final = "seq_aux_loss"
"""DeepSeek-V3's balance within each sequence (arXiv 2412.19437, section 2.1.2)."""

PLANNED: Final = {
    "yarn_rope": "our worker sets YaRN's frequencies as DeepSeek has them alone (4,096 positions, betas 32 and 1, latent attention)",
    "linear_rope": "our worker does not scale rotary positions linearly, which Megatron-core does by --rotary-seq-len-interpolation-factor",
    "zero_centered_norm": "Megatron-core's local norms are not zero-centered; with Transformer Engine they can be",
    "longrope_rope": "Megatron-core has no LongRoPE",
    "qk_norm_hidden": "Megatron-core has no norm of all queries and keys together",
    "attention_softcap": "Megatron-core has no soft cap of attention's scores",
    "score_width": "our worker does not scale scores otherwise than by the head's width",
    "mixed_rope": "Megatron-core has one set of rotary frequencies for all layers",
    "post_norm": "Megatron-core's layers norm before attention and MLP, not after",
    "sandwich_norm": "Megatron-core's layers norm before attention and MLP, not after",
    "embedding_scale": "Megatron-core does not scale token vectors",
    "embedding_norm": "Megatron-core does not norm token vectors before the first layer, as BigScience's fork does (--embed-layernorm)",
    "logits_softcap": "Megatron-core has no soft cap of logits",
    "mamba2": "Megatron-core's MambaMixer needs mamba-ssm's CUDA kernels (core/ssm/mamba_mixer.py), and our worker has no MambaModel",
    "gated_delta_net": "Megatron-core's GatedDeltaNet needs flash-linear-attention, whose kernels run on GPUs alone (core/ssm)",
    "output_gate": "our worker builds no gate of attention's output, which Megatron-core has (attention_output_gate)",
    "single_part_layers": "our worker builds no MambaModel, in which Megatron-core has layers of one part (core/ssm/mamba_block.py)",
    "chunked_attention": "Megatron-core has no attention in chunks",
    "query_temperature": "Megatron-core does not scale queries by their position",
    "no_rope_layers": "our worker has no layers without positions, which Megatron-core has (no_rope_freq)",
    "qk_l2_norm": "our worker builds no norm of queries and keys without weights, which Megatron-core has (qk_l2_norm)",
    "rank_capacity": "our worker has no HybridEP, whose buffers of one size are for GPUs alone (moe_expert_rank_capacity_factor)",
    "vision": "our worker builds no tower, which Megatron-Bridge has on the first stage (write=bridge)",
    "lora": "our worker puts no adapters beside Megatron's linears, which Megatron-Bridge and ms-swift do (write=bridge, ms_swift)",
    "scores_on_input": "our worker does not multiply experts' inputs by their scores, as Megatron-core can (moe_apply_probs_on_input)",
}
"""Parts that are priced as Megatron-core would run them, and what is lacking to train them under each release."""

BY_PROGRAM: Final = ("gated_delta_net", "output_gate", "zero_centered_norm", "rank_capacity")
"""Parts of `PLANNED` that Megatron-LM's own programs train with Transformer Engine: `flags` has them."""


def trained(version: str) -> tuple[str, ...]:
    """Parts that our worker trains under this version of Megatron-core, in its own loop."""
    release = release_of(version)
    return tuple(word for word in (*TRAINED, *OWN_LOOP) if word not in release.lacks)


def planned(version: str) -> dict[str, str]:
    """Parts that are planned alone, with what is lacking."""
    return {**PLANNED, **release_of(version).lacks}


def plan_only(a: Architecture, version: str, *, lora: bool = False) -> str | None:
    """Why a plan for this model, or its adapters, can't be trained here, in one line; None: it can."""
    lacking = planned(version)
    whys = [lacking[word] for word in (*a.features(), *["lora"] * lora) if word in lacking]
    return f"plan only: {'; '.join(dict.fromkeys(whys))}" if whys else None


def by_program(a: Architecture, version: str) -> bool:
    """Whether Megatron-LM's own programs train this model, whether or not our worker does."""
    lacking = planned(version)
    return all(word not in lacking or word in BY_PROGRAM for word in a.features())


def _attentions(a: Architecture) -> list[GroupedQueryAttention]:
    """The attention of each layer that has plain or grouped-query attention, in order."""
    return [layer.mixer for layer in a.each_layer() if isinstance(layer.mixer, GroupedQueryAttention)]


CLAMPED: Final = {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
"""GPT-OSS's gated activation: gate sigmoid(1.702 gate) (up + 1), both clamped (transformers, models/gpt_oss/modeling_gpt_oss.py)."""


def config_fields(a: Architecture) -> dict[str, Any]:
    """TransformerConfig's arguments of parts beyond plain attention and an MLP."""
    fields: dict[str, Any] = {}
    if any(attention.qk_norm == "head" for attention in _attentions(a)):
        fields["qk_layernorm"] = True
    fields |= _window_fields(_attentions(a))
    if a.activation == "clamped_swiglu":
        fields |= CLAMPED
    latent = latent_attention(a)
    if latent is not None:
        fields |= _latent_fields(a, latent)
    fields |= _delta_fields(a)
    if any(attention.output_gate for attention in _attentions(a)):
        fields["attention_output_gate"] = True
    if a.zero_centered_norm:
        fields["layernorm_zero_centered_gamma"] = True
    if a.experts:
        fields |= _expert_fields(a, a.experts[0])
    if a.mtp_num_layers:
        fields["mtp_num_layers"] = a.mtp_num_layers
    return fields


def _window_fields(attentions: Sequence[GroupedQueryAttention]) -> dict[str, Any]:
    """Windows as tokens seen before a token's own and after it, the layers that have them, and sinks, which all have or none (rule
    window_kinds)."""
    windows = [attention.window for attention in attentions]
    fields: dict[str, Any] = {}
    if any(windows):
        fields["window_size"] = [max(window for window in windows if window) - 1, 0]
        if not all(windows):
            fields["window_attn_skip_freq"] = [int(window is not None) for window in windows]
    if any(attention.sinks for attention in attentions):
        fields["softmax_type"] = "learnable"
    return fields


def delta_nets(a: Architecture) -> list[GatedDeltaNet]:
    """The different gated delta nets of its layers."""
    return list(dict.fromkeys(layer.mixer for layer in a.kinds_of_layers() if isinstance(layer.mixer, GatedDeltaNet)))


def _delta_fields(a: Architecture) -> dict[str, Any]:
    """Which layers have a gated delta net (transformer/transformer_config.py:275): an N where every Nth has attention and no other, else a
    list."""
    if not (nets := delta_nets(a)):
        return {}
    net, has = nets[0], [int(isinstance(layer.mixer, GatedDeltaNet)) for layer in a.each_layer()]
    every = has.index(0) + 1 if 0 in has else 0
    regular = every and has == [int((index + 1) % every != 0) for index in range(len(has))]
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": every if regular else has,
        **say(words.DELTA_NET, net),
    }


def latent_attention(a: Architecture) -> LatentAttention | None:
    """The latent attention of its layers, which have all the same (rule mixer_kinds); None: they have another mixer."""
    mixer = a.common_layer.mixer if not a.pattern else next(a.each_layer()).mixer
    return mixer if isinstance(mixer, LatentAttention) else None


def _latent_fields(a: Architecture, latent: LatentAttention) -> dict[str, Any]:
    """MLATransformerConfig's arguments (transformer/transformer_config.py:2006-2064): its layers have rotary frequencies of their own, and
    norms of the latent vectors where `qk_layernorm` says so."""
    return {
        "multi_latent_attention": True,
        **say(words.LATENT_ATTENTION, latent),
        "qk_layernorm": True,
        **_latent_rope(a, latent),
        "rotary_base": a.rotary_base,
        "rotary_percent": 1.0,
    }


def _latent_rope(a: Architecture, latent: LatentAttention) -> dict[str, Any]:
    """Positions for which the frequencies were made, and betas, are MLATransformerConfig's own (LatentAttention.yarn_mscale)."""
    if "latent_yarn" not in latent.features(a):
        return {"rope_type": "rope"}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": a.rope_scaling_factor,
        "mscale": latent.yarn_mscale,
        "mscale_all_dim": latent.yarn_mscale_all_dim or 0.0,
    }


def _expert_fields(a: Architecture, experts: Experts) -> dict[str, Any]:
    """The fields of the router, the experts and which layers have them (transformer/transformer_config.py:534-640). A softmax over the
    chosen experts' logits alone is what a softmax over all, made to sum to one, is."""
    has = [int(isinstance(layer.feed_forward, Experts)) for layer in a.each_layer()]
    sigmoid = experts.score == "sigmoid"
    fields: dict[str, Any] = {
        **say(words.EXPERTS, experts),
        "moe_layer_freq": 1 if all(has) else has,
        "moe_router_score_function": experts.score,
        "moe_router_pre_softmax": sigmoid or not experts.normalized,
        # The router in fp32: scores of many experts lie near each other.
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": experts.aux_loss_coeff,
    }
    if experts.aux_loss_coeff:
        fields["moe_router_load_balancing_type"] = SIGMOID_BALANCE if sigmoid else "aux_loss"
    return fields | say(words.ROUTING, experts)


SAID_OF_EVERY_MODEL: Final = ("rotary_base", "rotary_percent")
"""Fields whose flag stands with those of the other models, or is as it is by default."""


def pattern(values: Sequence[int]) -> str:
    """A list as the Python expression that Megatron evaluates, which has no spaces (arguments.py, moe_freq_type and _eval_pattern).

    >>> pattern([0, 0, 0, 1, 1])
    '([0]*3+[1]*2)'
    """
    return "(" + "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(values)) + ")"
