"""What a recompute mode drops of a layer, and what of it runs again in backward (Megatron's --recompute-modules, Korthikanti et al.,
arXiv 2205.05198, section 5)."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator.model.spec import Attention, Enter, Exit, LayerSpec
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Recompute

DROPPED: dict[str, tuple[str, ...]] = {
    "core_attn": ("core_attention",),
    "layernorm": ("norm", "mlp_norm"),
    "mlp": ("mlp", "expert_activation"),
    "moe_act": ("expert_activation",),
    "mla_up_proj": ("up_projected",),
}
"""Groups of saved tensors by module: a module's checkpoint keeps its input, and makes again what it saves and gives."""
NORMS = ("input_layernorm", "pre_mlp_layernorm")
"""The norms that "layernorm" is about (transformer_layer.py:382-436); the one before cross-attention is not."""
AGAIN: dict[str, tuple[str, ...]] = {
    "moe_act": ("mlp.experts.activation",),
    "mla_up_proj": tuple(f"self_attention.{name}" for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "rotary")),
}
"""Operations of modules that are a few by name (moe/experts.py, activation_recompute; multi_latent_attention.py, qkv_up_checkpoint)."""
MLP = "mlp."
"""How the MLP's operations are called (model/parts/mlp.py)."""


def dropped(mode: Recompute, *, fused_norms: bool) -> tuple[str, ...]:
    """Groups of saved tensors that this mode does not keep. "full" keeps the layer's input alone, which is no matter of groups.

    With `fused_norms` the MLP begins with its norm (Transformer Engine's LayerNormLinear), whose output then goes too.

    >>> dropped("mlp", fused_norms=True), dropped("selective", fused_norms=True)
    (('mlp', 'expert_activation', 'mlp_norm'), ('core_attention',))
    """
    modules = RECOMPUTE_MODULES.get(mode, ())
    groups = [group for module in modules for group in DROPPED[module]]
    return (*groups, "mlp_norm") if fused_norms and "mlp" in modules else tuple(groups)


def again(layer: LayerSpec, mode: Recompute, *, fused_norms: bool) -> LayerSpec | None:
    """The part of the layer that this mode of modules runs again, borders of its tensor-parallel regions included; None: none."""
    modules = RECOMPUTE_MODULES.get(mode, ())
    if not modules:
        return None
    where: set[int] = set()
    names = [getattr(op, "name", "") for op in layer.ops]
    if "core_attn" in modules:
        where |= {i for i, op in enumerate(layer.ops) if isinstance(op, Attention)}
    if "layernorm" in modules:
        where |= {i for i, name in enumerate(names) if name in NORMS}
    where |= {i for module in modules for i, name in enumerate(names) if name in AGAIN.get(module, ())}
    inside = [i for i, name in enumerate(names) if name.startswith(MLP)]
    if "mlp" in modules and inside:  # of experts too, with their exchange of tokens (Megatron's module "moe")
        first, last = inside[0], inside[-1]
        first -= first > 0 and isinstance(layer.ops[first - 1], Enter)
        last += last + 1 < len(layer.ops) and isinstance(layer.ops[last + 1], Exit)
        where |= set(range(first, last + 1))
        if fused_norms:
            where |= {i for i, name in enumerate(names) if name == NORMS[1]}
    return replace(layer, ops=tuple(op for i, op in enumerate(layer.ops) if i in where))
