"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values through low-rank projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from orchestrator.model.ops import Attention, Enter, Gemm, Op, Pointwise, Role, Saved, Weight
from orchestrator.model.parts.attention import projection
from orchestrator.model.parts.part import READ, WRITE, Part, linear_weights, norm_weights
from orchestrator.model.shared import Shared
from orchestrator.values import Value


class LatentAttention(Value, frozen=True, kw_only=True, tag="latent_attention", tag_field="kind", omit_defaults=True):
    """Heads are the architecture's; `num_query_groups` and `kv_channels` don't matter here."""

    q_lora_rank: int | None = None
    """Rank of the queries' projection; None: one matrix."""
    kv_lora_rank: int
    """Rank of the projection that keys and values share."""
    qk_head_dim: int
    """Width of a head's queries and keys without their rotary part."""
    qk_rope_head_dim: int
    """Width of the rotary part, which all heads' keys share."""
    v_head_dim: int
    yarn_mscale: float | None = None
    """Growth of cosine and sine with the logarithm of `rope_scaling_factor` in DeepSeek's YaRN (arXiv 2309.00071; 4,096 positions,
    betas of 32 and 1), as a ratio to what `yarn_mscale_all_dim` gives. None: positions are not stretched by that YaRN."""
    yarn_mscale_all_dim: float | None = None
    """Growth of the scores' scale with the logarithm of `rope_scaling_factor` in DeepSeek's YaRN; None: the scale stays as it
    is."""

    @property
    def label(self) -> str:
        return "latent"

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train this attention."""
        yield "latent_attention"
        if self.q_lora_rank is None:
            yield "full_rank_queries"
        if a.stretched_by == "yarn" and self.yarn_mscale is not None:
            yield "latent_yarn"

    def part(self, a: Shared, tokens: int, *, causal: bool) -> Part:
        """Weights and operations of mcore's transformer/multi_latent_attention.py; heads are divided by tp. The norms of the latent vectors
        are part of the linears that follow them (Transformer Engine's layers): weights, no operations of their own."""
        name, h, heads = "self_attention", a.hidden_size, a.num_attention_heads
        width = self.qk_head_dim + self.qk_rope_head_dim
        q, values = heads * width, heads * self.v_head_dim
        kv = heads * self.qk_head_dim + values
        down = self.kv_lora_rank + self.qk_rope_head_dim
        made: list[tuple[tuple[Weight, ...], Gemm]] = []

        def linear(part: str, role: Role, k: int, n: int, split: Literal["column"] | None) -> None:
            weights = linear_weights(f"{name}.{part}", n, k, split, bias=False)
            saved = Saved(name=f"{name}.{part}.input", elements=tokens * k, shard="sequence", group="attention")
            made.append((weights, Gemm(name=f"{name}.{part}", role=role, tokens=tokens, k=k, n=n, split=split, saves=(saved,))))

        norms = norm_weights(f"{name}.kv_layernorm", a, self.kv_lora_rank)
        if self.q_lora_rank is not None:
            linear("linear_q_down_proj", "query_down", h, self.q_lora_rank, None)
            norms += norm_weights(f"{name}.q_layernorm", a, self.q_lora_rank)
        linear("linear_kv_down_proj", "key_value_down", h, down, None)
        if self.q_lora_rank is not None:
            linear("linear_q_up_proj", "query_up", self.q_lora_rank, q, "column")
        else:
            linear("linear_q_proj", "latent_query", h, q, "column")
        linear("linear_kv_up_proj", "key_value_up", self.kv_lora_rank, kv, "column")
        core = Attention(
            name=f"{name}.core_attention",
            query_len=tokens,
            key_len=tokens,
            heads=heads,
            kv_heads=heads,
            head_dim=(width + self.v_head_dim) // 2,  # scores over the whole width, values over theirs
            causal=causal,
            saves=(
                Saved(name=f"{name}.query", elements=tokens * q, shard="tp", group="up_projected"),
                Saved(name=f"{name}.key_value", elements=tokens * (q + values), shard="tp", group="up_projected"),
            ),
        )
        rotary = Pointwise(name=f"{name}.rotary", role="rotary", elements=tokens * (q + kv), moved=READ + WRITE, shard="tp")
        ops: tuple[Op, ...] = (Enter(elements=tokens * h), *(gemm for _, gemm in made), rotary, core, *projection(name, a, tokens, values))
        weights = tuple(weight for found, _ in made for weight in found)
        return Part(weights + norms + linear_weights(f"{name}.linear_proj", h, values, "row", bias=False), ops)
