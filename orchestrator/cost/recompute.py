"""What a recompute mode drops of a layer, and what of it runs again in backward (Megatron's --recompute-modules, Korthikanti et al.,
arXiv 2205.05198, section 5)."""

from __future__ import annotations

from msgspec.structs import replace

from orchestrator.model.ops import FEED_FORWARD, Role
from orchestrator.model.spec import Enter, Exit, Gemm, LayerSpec, Pointwise
from orchestrator.strategy.spec import RECOMPUTE_MODULES, Recompute, Strategy

DROPPED: dict[str, tuple[str, ...]] = {
    "core_attn": ("core_attention",),
    "layernorm": ("norm", "mlp_norm"),
    "mlp": ("mlp", "expert_activation"),
    "moe_act": ("expert_activation",),
    "mla_up_proj": ("up_projected",),
}
"""Groups of saved tensors by module: a module's checkpoint keeps its input, and makes again what it saves and gives."""
AGAIN: dict[str, tuple[Role, ...]] = {
    "core_attn": ("core_attention",),
    "layernorm": ("input_norm", "mlp_norm"),
    "moe_act": ("routed_activation",),
    "mla_up_proj": ("latent_query", "query_up", "key_value_up", "rotary"),
}
"""Roles of the operations that a module runs again, where these are a few (transformer_layer.py:382-436, where the norm before
cross-attention is not one; moe/experts.py, activation_recompute; multi_latent_attention.py, qkv_up_checkpoint)."""


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
    """The part of the layer that this mode of modules runs again, with the operations at the borders of its tensor-parallel regions
    (`Enter`, `Exit`: all-reduce, or all-gather and reduce-scatter); None: none."""
    modules = RECOMPUTE_MODULES.get(mode, ())
    if not modules:
        return None
    where: set[int] = set()
    roles = [op.role for op in layer.ops]
    where |= {i for module in modules for i, role in enumerate(roles) if role in AGAIN.get(module, ())}
    inside = [i for i, role in enumerate(roles) if role in FEED_FORWARD]
    if "mlp" in modules and inside:  # of experts too, with their exchange of tokens (Megatron's module "moe")
        first, last = inside[0], inside[-1]
        first -= first > 0 and isinstance(layer.ops[first - 1], Enter)
        last += last + 1 < len(layer.ops) and isinstance(layer.ops[last + 1], Exit)
        where |= set(range(first, last + 1))
        if fused_norms:
            where |= {i for i, role in enumerate(roles) if role == "mlp_norm"}
    return replace(layer, ops=tuple(op for i, op in enumerate(layer.ops) if i in where))


def tiled(layer: LayerSpec, strategy: Strategy) -> tuple[LayerSpec, int] | None:
    """The part of the layer that is computed piece by piece of a sequence, and once more in backward, with the number of pieces; None:
    none (DeepSpeed's TiledMLP and sequence_tiled_compute, runtime/sequence_parallel/ulysses_sp.py)."""
    if strategy.tiled_mlp > 1 and layer.recomputable:
        part = again(layer, "mlp", fused_norms=False)
        return None if part is None or not part.ops else (part, strategy.tiled_mlp)
    if strategy.tiled_logits > 1 and any(isinstance(op, Gemm) and op.pad_to for op in layer.ops):
        ops = tuple(op for op in layer.ops if (isinstance(op, Gemm) and op.pad_to) or op.role == "loss")
        return replace(layer, ops=ops), strategy.tiled_logits
    return None


def one_of(part: LayerSpec, pieces: int) -> LayerSpec:
    """The layer for one of so many pieces of a sequence, of which `tiled` says that they divide it."""
    return replace(part, ops=tuple(op.of_piece(pieces) if isinstance(op, Gemm | Pointwise) else op for op in part.ops))
