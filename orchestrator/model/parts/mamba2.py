"""Mamba-2 (Dao and Gu, arXiv 2405.21060, section 7): a state space whose decay depends on the token, between a short convolution and a
gated norm."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.model.ops import Enter, Exit, Gemm, Pointwise, Saved, Scan, Weight
from orchestrator.model.parts.part import READ, WRITE, Part, linear_weights
from orchestrator.model.shared import Shared
from orchestrator.values import Value

CONVOLVED_AGAIN = 2 * READ + READ + 2 * WRITE
"""Bytes that the convolution's backward moves an element: forward again, which nothing keeps, then input and output's gradient read and the
input's written (mamba-ssm, ops/triton/ssd_combined.py)."""


class Mamba2(Value, frozen=True, kw_only=True, tag="mamba2", tag_field="kind", omit_defaults=True):
    """Heads, groups and widths are its own; `num_attention_heads` and `num_query_groups` don't matter here."""

    num_heads: int
    head_dim: int
    """Channels of one head."""
    state_size: int
    """Numbers that a channel remembers."""
    num_groups: int = 1
    """Groups of heads; the heads of a group share B and C."""
    conv_kernel: int = 4
    """Tokens that the convolution sees."""
    conv_bias: bool = True
    chunk_size: int = 256
    """Tokens of one chunk of the scan."""

    @property
    def label(self) -> str:
        return "mamba2"

    @property
    def inner_size(self) -> int:
        """Channels of all heads together."""
        return self.num_heads * self.head_dim

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train this mixer."""
        yield "mamba2"

    def part(self, a: Shared, tokens: int, *, causal: bool) -> Part:
        """Weights and operations of mcore's ssm/mamba_mixer.py: one projection to gate, inputs, B, C and steps (heads divided by tp),
        convolution, scan, gated norm, projection back. For backward the scan keeps what it was given before the convolution, which it
        computes again, and its output before the gate (mamba-ssm, ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn); the norm its
        input."""
        name, h, inner, heads = "mixer", a.hidden_size, self.inner_size, self.num_heads
        convolved = inner + 2 * self.num_groups * self.state_size
        projected = inner + convolved + heads
        weights = [
            *linear_weights(f"{name}.in_proj", projected, h, "column", bias=False),
            Weight(name=f"{name}.conv1d.weight", shape=(convolved, 1, self.conv_kernel), split=0),
            *((Weight(name=f"{name}.conv1d.bias", shape=(convolved,), split=0),) if self.conv_bias else ()),
            *(Weight(name=f"{name}.{each}", shape=(heads,), split=0) for each in ("dt_bias", "A_log", "D")),
            Weight(name=f"{name}.norm.weight", shape=(inner,), split=0),
            *linear_weights(f"{name}.out_proj", h, inner, "row", bias=False),
        ]

        def kept(of: str, width: int, *, shard: str = "tp", group: str = "attention") -> Saved:
            return Saved(name=f"{name}.{of}", elements=tokens * width, shard=shard, group=group)  # type: ignore[arg-type]

        scan = Scan(
            name=f"{name}.scan",
            tokens=tokens,
            heads=heads,
            head_dim=self.head_dim,
            state=self.state_size,
            groups=self.num_groups,
            chunk=self.chunk_size,
            saves=(kept("scan.input", projected), kept("scan.output", inner)),
        )
        norm = Pointwise(name=f"{name}.norm", role="scan_norm", elements=tokens * inner, moved=READ + WRITE, shard="tp",
                         saves=(kept("norm.input", inner),))  # fmt: skip
        conv = Pointwise(name=f"{name}.conv1d", elements=tokens * convolved, moved=READ + WRITE, moved_backward=CONVOLVED_AGAIN, shard="tp")
        entering = kept("in_proj.input", h, shard="sequence", group="norm")
        return Part(
            tuple(weights),
            (
                Enter(elements=tokens * h),
                Gemm(name=f"{name}.in_proj", role="in_projection", tokens=tokens, k=h, n=projected, split="column", saves=(entering,)),
                conv,
                scan,
                norm,
                Gemm(
                    name=f"{name}.out_proj",
                    role="out_projection",
                    tokens=tokens,
                    k=inner,
                    n=h,
                    split="row",
                    saves=(kept("out_proj.input", inner),),
                ),
                Exit(elements=tokens * h),
            ),
        )
