"""What megatron-core's layers can compute again."""

from __future__ import annotations

from typing import Final

from orchestrator.engines.megatron_parts import latent_attention
from orchestrator.engines.rules.rule import refused, rule
from orchestrator.hardware.spec import Software
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Candidate, Recompute
from orchestrator.strategy.workload import Workload

PINNED_WITH_FUSED_ATTENTION: Final[tuple[Recompute, ...]] = ("selective",)
"""Megatron's --recompute-activations drops the scores. Fused attention keeps none, only their logsumexp: 0.1% of a layer, for the whole
attention again (transformer_config.py:1224 says that it is needless)."""


def fused_attention(software: Software) -> bool:
    """Whether megatron-core's layers keep no scores: with Transformer Engine. Its own DotProductAttention (models/backends.py:113) makes
    them all, and the flash-attn package serves its inference alone (transformer/attention.py:94)."""
    return software.transformer_engine


recompute_mlp = refused(
    "recompute_mlp_bias",
    "recompute_sel: core/transformer/transformer_layer.py:719, core/tensor_parallel/random.py:496 (README, silently wrong 9)",
    *("model recompute", "recompute.mlp add_bias_linear"),
    "recompute={strategy.recompute} with add_bias_linear: the MLP's checkpoint gives its bias back as an output, and backward never ends",
)


@rule(
    "recompute_fused_norm", "recompute_sel: core/transformer/transformer_layer.py:384", "model software recompute", "recompute.layernorm te"
)
def recompute_norms(candidate: Candidate, workload: Workload) -> str | None:
    mode, a = candidate.strategy.recompute, workload.model.architecture
    if a.experts or latent_attention(a) is not None:
        why = "Transformer Engine has norms apart before experts and latent attention alone, and layernorm of these no price"
        return f"recompute={mode}: {why}"
    return f"recompute={mode}: Transformer Engine's norms are part of the linears behind them, so that layernorm recomputes nothing"


@rule(
    "recompute_flash",
    "ours: core/transformer/transformer_config.py:1224 (core_attn is needless with fused attention)",
    "software recompute",
)
def recompute_attention(candidate: Candidate, workload: Workload) -> str | None:
    mode, cluster = candidate.strategy.recompute, workload.cluster
    fused = fused_attention(cluster.software) and not cluster.is_cpu
    if not fused or mode == "selective" or "core_attn" not in RECOMPUTE_MODULES.get(mode, ()):
        return None
    rest = "+".join(module for module in RECOMPUTE_MODULES[mode] if module != "core_attn")
    return f"recompute={mode}: flash attention keeps no scores that core_attn could drop; take {rest}"


recompute_latent = refused(
    "recompute_latent", "core/transformer/transformer_config.py:1217", "model recompute", "recompute.mla_up_proj !latent_attention",
    "recompute={strategy.recompute}: mla_up_proj is a module of latent attention, which this model has not",
)  # fmt: skip
recompute_experts = refused(
    "recompute_experts", "core/transformer/transformer_config.py:1212,1242", "model software recompute", "recompute.moe_act",
    ("!experts", "recompute={strategy.recompute}: moe_act is a module of experts, and a dense model has none"),
    ("!te", "recompute={strategy.recompute}: moe_act needs the experts' products as one, which is Transformer Engine's on GPUs"),
    ("precision=fp8 !fp8_recipe", "recompute={strategy.recompute}: delayed scaling of FP8 has no recompute of moe_act"),
    ("precision=fp8 fp8_recipe=delayed", "recompute={strategy.recompute}: delayed scaling of FP8 has no recompute of moe_act"),
)  # fmt: skip

RECOMPUTE_RULES: Final = (recompute_mlp, recompute_norms, recompute_latent, recompute_experts, recompute_attention)
"""Rules on the modules that are recomputed, shared by the engine modes that build megatron-core models."""
