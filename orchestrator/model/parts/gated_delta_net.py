"""The gated delta net (Yang, Kautz and Hatamizadeh, arXiv 2412.06464): linear attention whose state decays and forgets what it holds under
a key before it learns a new value, between a short convolution and a gated norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from orchestrator.model.ops import DeltaRule, Enter, Exit, Gemm, Pointwise, Role, Saved, Weight
from orchestrator.model.parts.part import READ, WRITE, Part, linear_weights
from orchestrator.model.shared import Shared
from orchestrator.values import Value

CHUNK: Final = 64
"""Tokens of one chunk: fixed in flash-linear-attention's kernels (ops/gated_delta_rule/chunk.py), and the default of transformers'
torch_chunk_gated_delta_rule (modeling_qwen3_next.py)."""


class GatedDeltaNet(Value, frozen=True, kw_only=True, tag="gated_delta_net", tag_field="kind", omit_defaults=True):
    """Heads and widths are its own; `num_attention_heads`, `num_query_groups` and positions don't matter here."""

    num_key_heads: int
    """Heads of the queries and of the keys."""
    num_value_heads: int
    """A multiple of them: several heads of values share a query and a key."""
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_kernel: int = 4
    """Tokens that the convolution sees."""

    @property
    def label(self) -> str:
        return "delta"

    @property
    def key_size(self) -> int:
        """Channels of all heads' keys together."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def projected_size(self) -> int:
        """Queries, keys, values, their gate, and for each head of values how fast it learns and how fast it decays."""
        return 2 * self.key_size + 2 * self.value_size + 2 * self.num_value_heads

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train this mixer."""
        yield "gated_delta_net"

    def part(self, a: Shared, tokens: int, *, causal: bool) -> Part:
        """Weights and operations of mcore's ssm/gated_delta_net.py: one projection (heads divided by tp), convolution of queries, keys and
        values, norms of queries and keys without weights, which are then repeated where values have more heads, the rule, a norm of each
        head's width, its gate, projection back. The convolution, the norms and the gate keep what they are given; the rule queries, keys,
        values and the inverse of each chunk's triangle (flash-linear-attention, ChunkGatedDeltaRuleFunction). Steps and decays, a number a
        head and token, are counted in the projection alone."""
        name, h, keys, values = "self_attention", a.hidden_size, self.key_size, self.value_size
        convolved, repeated = 2 * keys + values, 2 * self.num_value_heads * self.key_head_dim
        weights = [
            *linear_weights(f"{name}.in_proj", self.projected_size, h, "column", bias=False),
            Weight(name=f"{name}.conv1d.weight", shape=(convolved, 1, self.conv_kernel), split=0),
            *(Weight(name=f"{name}.{each}", shape=(self.num_value_heads,), split=0) for each in ("dt_bias", "A_log")),
            Weight(name=f"{name}.out_norm.weight", shape=(self.value_head_dim,), kind="norm"),
            *linear_weights(f"{name}.out_proj", h, values, "row", bias=False),
        ]

        def kept(of: str, width: int) -> Saved:
            return Saved(name=f"{name}.{of}", elements=tokens * width, shard="tp", group="attention")

        def pointwise(of: str, width: int, moved: float, *saves: Saved, role: Role = "") -> Pointwise:
            return Pointwise(name=f"{name}.{of}", role=role, elements=tokens * width, moved=moved, shard="tp", saves=saves)

        rule = DeltaRule(
            name=f"{name}.delta_rule",
            tokens=tokens,
            heads=self.num_value_heads,
            key_dim=self.key_head_dim,
            value_dim=self.value_head_dim,
            chunk=CHUNK,
            saves=(kept("delta_rule.input", repeated + values), kept("delta_rule.inverse", self.num_value_heads * CHUNK)),
        )
        entering = Saved(name=f"{name}.in_proj.input", elements=tokens * h, group="norm")
        repeats = (pointwise("repeat", repeated, READ + WRITE),) if self.num_value_heads > self.num_key_heads else ()
        return Part(
            tuple(weights),
            (
                Enter(elements=tokens * h),
                Gemm(
                    name=f"{name}.in_proj",
                    role="in_projection",
                    tokens=tokens,
                    k=h,
                    n=self.projected_size,
                    split="column",
                    saves=(entering,),
                ),
                pointwise("conv1d", convolved, READ + WRITE, kept("conv1d.input", convolved)),
                pointwise("l2norm", 2 * keys, READ + WRITE, kept("l2norm.input", 2 * keys), role="norm"),
                *repeats,
                rule,
                pointwise("out_norm", values, READ + WRITE, kept("out_norm.input", values), role="norm"),
                pointwise("gate", values, 2 * READ + WRITE, kept("gate.input", values), kept("gate.normed", values)),
                Gemm(
                    name=f"{name}.out_proj",
                    role="out_projection",
                    tokens=tokens,
                    k=values,
                    n=h,
                    split="row",
                    saves=(kept("out_proj.input", values),),
                ),
                Exit(elements=tokens * h),
            ),
        )
