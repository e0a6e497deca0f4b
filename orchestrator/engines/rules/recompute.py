"""What megatron-core's layers can compute again."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.rules.rule import refused
from orchestrator.hardware.spec import Software
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Recompute

PINNED_WITH_FUSED_ATTENTION: Final[tuple[Recompute, ...]] = ("selective",)
"""Megatron's --recompute-activations drops the scores. Fused attention keeps none, only their logsumexp: 0.1% of a layer, for the whole
attention again (transformer_config.py:1224 says that it is needless)."""


def fused_attention(software: Software) -> bool:
    """Whether megatron-core's layers keep no scores: with Transformer Engine. Its own DotProductAttention (models/backends.py:113) makes
    them all, and the flash-attn package serves its inference alone (transformer/attention.py:94)."""
    return software.transformer_engine


RECOMPUTE_RULES: Final = (
    refused("recompute_mlp_bias",
            "recompute_sel: core/transformer/transformer_layer.py:719, core/tensor_parallel/random.py:496 (README, silently wrong 9)",
            "model recompute", "recompute.mlp add_bias_linear",
            "recompute={strategy.recompute} with add_bias_linear: the MLP's checkpoint gives its bias back as an output, and backward "
            "never ends"),
    refused("recompute_fused_norm", "recompute_sel: core/transformer/transformer_layer.py:384", "model software recompute",
            "recompute.layernorm te",
            *((part, "recompute={strategy.recompute}: Transformer Engine has norms apart before experts and latent attention alone, and "
               "layernorm of these no price") for part in ("experts", "latent_attention")),
            "recompute={strategy.recompute}: Transformer Engine's norms are part of the linears behind them, so that layernorm recomputes "
            "nothing"),
    refused("recompute_latent", "core/transformer/transformer_config.py:1217", "model recompute", "recompute.mla_up_proj !latent_attention",
            "recompute={strategy.recompute}: mla_up_proj is a module of latent attention, which this model has not"),
    refused("recompute_experts", "core/transformer/transformer_config.py:1212,1242", "model software recompute", "recompute.moe_act",
            ("!experts", "recompute={strategy.recompute}: moe_act is a module of experts, and a dense model has none"),
            ("!te", "recompute={strategy.recompute}: moe_act needs the experts' products as one, which is Transformer Engine's on GPUs"),
            ("precision=fp8 fp8_recipe=None|delayed",
             "recompute={strategy.recompute}: delayed scaling of FP8 has no recompute of moe_act")),
    refused("recompute_flash", "ours: core/transformer/transformer_config.py:1224 (core_attn is needless with fused attention)",
            "software recompute", "te",
            *((f"recompute={mode}", f"recompute={mode}: flash attention keeps no scores that core_attn could drop; take "
               f"{'+'.join(module for module in modules if module != 'core_attn')}")
              for mode, modules in RECOMPUTE_MODULES.items() if "core_attn" in modules and mode != "selective")),
)  # fmt: skip
"""Rules on the modules that are recomputed, shared by the engine modes that build megatron-core models."""
