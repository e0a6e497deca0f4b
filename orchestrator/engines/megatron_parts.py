"""Which parts of models megatron-core 0.16.1's layers have and our workers train, in the words of `Architecture.features`; and how a part
is said in TransformerConfig's words and in Megatron-LM's flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final, TypeVar

from orchestrator.engines.megatron_versions import release_of
from orchestrator.model.architecture import Architecture, Layer
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.words import megatron as words
from orchestrator.words.terms import Table, Term, fixed, flags, inside, only, say

M = TypeVar("M")
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


def mixers(kind: type[M], layers: Iterable[Layer]) -> list[M]:
    """The mixers of this kind that these layers have, in order."""
    return [layer.mixer for layer in layers if isinstance(layer.mixer, kind)]


attentions: Final = partial(mixers, GroupedQueryAttention)
"""The plain and grouped-query attention of layers."""
CLAMPED: Final = {"glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
"""GPT-OSS's gated activation: gate sigmoid(1.702 gate) (up + 1), both clamped (transformers, models/gpt_oss/modeling_gpt_oss.py)."""


def _windows(a: Architecture) -> list[int]:
    """The windows of layers with attention; 0: a layer has none."""
    return [attention.window or 0 for attention in attentions(a.each_layer())]


def delta_nets(a: Architecture) -> list[GatedDeltaNet]:
    """The different gated delta nets of its layers."""
    return list(dict.fromkeys(mixers(GatedDeltaNet, a.kinds_of_layers())))


def _delta_layers(a: Architecture) -> int | list[int]:
    """Which layers have a gated delta net (transformer/transformer_config.py:275): an N where every Nth has attention and no other, else a
    list."""
    has = [int(isinstance(layer.mixer, GatedDeltaNet)) for layer in a.each_layer()]
    every = has.index(0) + 1 if 0 in has else 0
    return every if every and has == [int((index + 1) % every != 0) for index in range(len(has))] else has


def latent_attention(a: Architecture) -> LatentAttention | None:
    """The latent attention of its layers, which have all the same (rule mixer_kinds); None: they have another mixer."""
    mixer = a.common_layer.mixer if not a.pattern else next(a.each_layer()).mixer
    return mixer if isinstance(mixer, LatentAttention) else None


def _stretched(a: Architecture) -> LatentAttention | None:
    """The latent attention that YaRN stretches; None: the model has none."""
    latent = latent_attention(a)
    return latent if latent is not None and "latent_yarn" in latent.features(a) else None


def _experts(a: Architecture) -> Experts | None:
    return next(iter(a.experts), None)


def _expert_layers(a: Architecture) -> int | list[int]:
    has = [int(isinstance(layer.feed_forward, Experts)) for layer in a.each_layer()]
    return 1 if all(has) else has


PARTS: Final[Table] = (
    Term("qk_layernorm", "", unless=False, of=lambda a: any(attention.qk_norm == "head" for attention in attentions(a.each_layer()))),
    # Tokens seen before a token's own and after it, and the layers with a window; sinks all have or none (rule window_kinds).
    Term("window_size", "", of=lambda a: [max(_windows(a)) - 1, 0], when=lambda a: any(_windows(a))),
    Term("window_attn_skip_freq", "", of=lambda a: [int(window > 0) for window in _windows(a)],
         when=lambda a: any(_windows(a)) and not all(_windows(a))),
    Term("softmax_type", "", of=lambda a: "learnable", when=lambda a: any(attention.sinks for attention in attentions(a.each_layer()))),
    *only(lambda a: a.activation == "clamped_swiglu", [fixed(*one) for one in CLAMPED.items()]),
    # MLATransformerConfig's arguments (transformer/transformer_config.py:2006-2064): rotary frequencies of its own, and norms of the latent
    # vectors. Positions for which YaRN's are made, and betas, are its own (LatentAttention.yarn_mscale).
    *inside(latent_attention, (fixed("multi_latent_attention", True), *words.LATENT_ATTENTION, fixed("qk_layernorm", True))),
    *only(latent_attention, [Term("rope_type", "", of=lambda a: "yarn" if _stretched(a) else "rope")]),
    *only(_stretched, [Term("rotary_scaling_factor", "rope_scaling_factor")]),
    *inside(_stretched, [Term("mscale", "yarn_mscale"), Term("mscale_all_dim", "yarn_mscale_all_dim", to=lambda scale: scale or 0.0)]),
    *only(latent_attention, [Term("rotary_base", "rotary_base"), fixed("rotary_percent", 1.0)]),
    *only(delta_nets, [fixed("experimental_attention_variant", "gated_delta_net"), Term("linear_attention_freq", "", of=_delta_layers)]),
    *inside(lambda a: next(iter(delta_nets(a)), None), words.DELTA_NET),
    Term("attention_output_gate", "", unless=False, of=lambda a: any(attention.output_gate for attention in attentions(a.each_layer()))),
    *flags("layernorm_zero_centered_gamma=zero_centered_norm"),
    # The router, the experts and which layers have them (transformer/transformer_config.py:534-640). A softmax over the chosen experts'
    # logits alone is what a softmax over all, made to sum to one, is. The router is in fp32: scores of many experts lie near each other.
    *inside(_experts, words.EXPERTS),
    *only(_experts, [Term("moe_layer_freq", "", of=_expert_layers)]),
    *inside(_experts, (
        Term("moe_router_score_function", "score"),
        Term("moe_router_pre_softmax", "", of=lambda experts: experts.score == "sigmoid" or not experts.normalized),
        fixed("moe_router_dtype", "fp32"),
        Term("moe_router_load_balancing_type", "", of=lambda experts: (
            words.BALANCED_OVER[experts.balanced_over] if experts.aux_loss_coeff else "none")),
        Term("moe_aux_loss_coeff", "aux_loss_coeff"),
        *words.ROUTING,
    )),
    Term("mtp_num_layers", "mtp_num_layers", unless=0),
)  # fmt: skip
"""Settings of parts beyond plain attention and an MLP."""


def config_fields(a: Architecture) -> dict[str, Any]:
    """TransformerConfig's arguments of parts beyond plain attention and an MLP."""
    return say(PARTS, a)


SAID_OF_EVERY_MODEL: Final = ("rotary_base", "rotary_percent")
"""Fields whose flag stands with those of the other models, or is as it is by default."""


def pattern(values: Sequence[int]) -> str:
    """A list as the Python expression that Megatron evaluates, which has no spaces (arguments.py, moe_freq_type and _eval_pattern).

    >>> pattern([0, 0, 0, 1, 1])
    '([0]*3+[1]*2)'
    """
    return "(" + "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(values)) + ")"
