"""Multi-latent attention on megatron-core's own layers, where there is no Transformer Engine.

Two things of Transformer Engine's are asked for there: an attention that is told the widths of keys and of values, which differ, and a
linear that every tensor-parallel rank has whole. megatron-core's local specs divide the down projections over tp instead, and then nothing
sums the gradient of the keys' rotary part, which all heads share, over the tensor-parallel group
(transformer/multi_latent_attention.py:573 in 0.16.1: the backward pass of that gather only splits): silently wrong with tp > 1.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class DuplicatedLinear(torch.nn.Module):
    """Transformer Engine's linear with parallel_mode="duplicated": (output_size, input_size), whole on every tensor-parallel rank. Under
    sequence parallelism each rank has some tokens, and finalize_model_grads sums the gradients over the group."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        tp, dp_cp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets, tp_group=tp, dp_cp_group=dp_cp)


@cache
def with_widths(attention: type[DotProductAttention]) -> type[DotProductAttention]:
    """A subclass of this attention that is told the widths: scores over the queries' whole one, values over their own."""

    class LatentDotProductAttention(attention):
        def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **more: Any) -> None:
            super().__init__(*args, **more)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentDotProductAttention


def complete(spec: Any) -> Any:
    """A local spec of layers with latent attention, or of a block of them, with these two in place of what can't do it."""
    # 0.16.1 takes `TELinear = None` for an installed Transformer Engine, and compares with it (multi_latent_attention.py:54-66).
    multi_latent_attention.HAVE_TE, multi_latent_attention.TELinear = False, DuplicatedLinear
    for layer in spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]:
        parts = layer.submodules.self_attention.submodules
        if parts.linear_kv_down_proj is DuplicatedLinear:
            continue  # layers of a kind share one spec
        parts.linear_q_down_proj = parts.linear_kv_down_proj = DuplicatedLinear
        parts.core_attention = with_widths(parts.core_attention)
    return spec
