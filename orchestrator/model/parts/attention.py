"""Multi-head attention with grouped queries (arXiv 2305.13245), and cross-attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, Literal

from orchestrator.model.ops import Attention, Enter, Exit, Gemm, Op, Pointwise, Saved, Weight
from orchestrator.model.parts.part import MASK_BYTES, READ, WRITE, Part, linear_weights, norm_weights
from orchestrator.model.shared import Shared
from orchestrator.values import Value

LOGSUMEXP_BYTES: Final = 4
"""Bytes of the logsumexp that flash attention keeps of each row of scores, in fp32 (Dao, arXiv 2307.08691, algorithm 1)."""


class GroupedQueryAttention(Value, frozen=True, kw_only=True, tag="attention", tag_field="kind", omit_defaults=True):
    """Heads, groups, their width, biases and rotary frequencies are the architecture's; here stands what may differ from layer to layer."""

    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    sinks: bool = False
    """A learned logit for each head that takes its share of the softmax (GPT-OSS)."""
    chunk: int | None = None
    """Tokens of a chunk that sees nothing of those before it (Llama 4); None: one chunk."""
    qk_norm: Literal["head", "hidden", "l2"] | None = None
    """A norm of queries and keys before their rotation: of each head's width (Qwen3), or of all heads together (OLMo 2); or of each head's
    width without a weight, which rotation doesn't change (Llama 4)."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap) (Gemma 2)."""
    score_width: float | None = None
    """Scores are divided by the square root of this width; None: of the head's width."""
    temperature: tuple[float, float] | None = None
    """(scale, tokens): queries are multiplied by 1 + scale * log(1 + floor((position + 1) / tokens)) (Llama 4; arXiv 2501.19399)."""
    rotary: bool = True
    """Whether this layer turns queries and keys by their positions; False: it has no positions, though the model's are rotary (Llama 4)."""
    rotary_base: int | None = None
    """Base of this layer's rotary frequencies; None: the model's `rotary_base`."""
    rotary_scaled: bool = True
    """Whether the model's scaling of rotary frequencies holds here."""
    output_gate: bool = False
    """What attention gives is multiplied by the sigmoid of a gate, which the queries' projection makes beside them (Qwen3-Next;
    arXiv 2505.06708)."""

    @property
    def label(self) -> str:
        return f"window{self.window}" if self.window else f"chunk{self.chunk}" if self.chunk else ""

    def features(self, a: Shared) -> Iterator[str]:
        """The features that an engine's capabilities must name to train this attention."""
        yield "attention"
        scaled_otherwise = a.rope_scaling_factor is not None and not self.rotary_scaled
        base = self.rotary_base not in (None, a.rotary_base)
        words = (
            ("window", self.window is not None),
            ("sinks", self.sinks),
            ("qk_norm", self.qk_norm == "head"),
            ("qk_norm_hidden", self.qk_norm == "hidden"),
            ("qk_l2_norm", self.qk_norm == "l2"),
            ("chunked_attention", self.chunk is not None),
            ("query_temperature", self.temperature is not None),
            ("attention_softcap", self.softcap is not None),
            ("score_width", self.score_width not in (None, a.head_dim)),
            ("no_rope_layers", a.position_embedding == "rope" and not self.rotary),
            ("output_gate", self.output_gate),
            ("mixed_rope", a.position_embedding == "rope" and (base or scaled_otherwise)),
        )
        yield from (word for word, used in words if used)

    def part(self, a: Shared, tokens: int, *, causal: bool) -> Part:
        """Weights and operations: fused QKV, norms of queries and keys, rotary embedding, attention, projection (mcore
        transformer/attention.py:1264)."""
        name, h = "self_attention", a.hidden_size
        q, kv = a.num_attention_heads * a.head_dim, a.query_groups * a.head_dim
        qkv_input = Saved(name=f"{name}.linear_qkv.input", elements=tokens * h, group="norm")
        rotary = Pointwise(name=f"{name}.rotary", role="rotary", elements=tokens * (q + kv), moved=READ + WRITE, shard="tp")
        sinks = Weight(name=f"{name}.core_attention.softmax_offset", shape=(a.num_attention_heads,), split=0)
        norms = self._norms(name, a, tokens, q, kv)
        width = 2 * kv + (2 * q if self.output_gate else q)
        return Part(
            weights=linear_weights(f"{name}.linear_qkv", width, h, "column", bias=a.add_bias_linear or a.add_qkv_bias)
            + norms.weights
            + ((sinks,) if self.sinks else ())
            + linear_weights(f"{name}.linear_proj", h, q, "row", bias=a.add_bias_linear),
            ops=(
                Enter(elements=tokens * h),
                Gemm(name=f"{name}.linear_qkv", role="qkv", tokens=tokens, k=h, n=width, split="column", saves=(qkv_input,)),
                *norms.ops,
                *((rotary,) if a.position_embedding == "rope" and self.rotary else ()),
                core_attention(name, a, tokens, tokens, causal=causal, window=self.window or 0, chunk=self.chunk or 0),
                *(gate(name, tokens * q) if self.output_gate else ()),
                *projection(name, a, tokens, q),
            ),
        )

    def _norms(self, name: str, a: Shared, tokens: int, q: int, kv: int) -> Part:
        """The norms of queries and of keys; each keeps its input for backward."""
        if self.qk_norm is None:
            return Part()
        weights: list[Weight] = []
        ops: list[Op] = []
        for which, width in (("q", q), ("k", kv)):
            norm, elements, most = f"{name}.{which}_layernorm", tokens * width, a.query_groups if which == "k" else 0
            saved = Saved(name=f"{norm}.input", elements=elements, shard="tp", group="attention", max_shards=most)
            if self.qk_norm != "l2":
                weights += norm_weights(norm, a, a.head_dim if self.qk_norm == "head" else width)
            ops.append(Pointwise(name=norm, role="norm", elements=elements, moved=READ + WRITE, shard="tp", saves=(saved,)))
        return Part(tuple(weights), tuple(ops))


def core_attention(name: str, a: Shared, query_len: int, key_len: int, *, causal: bool, window: int = 0, chunk: int = 0) -> Attention:
    """Q, K, V are saved always; the softmax, its dropout's mask and output only where the scores are materialised; the logsumexp only
    by flash attention, whose output is the projection's saved input."""
    q = query_len * a.num_attention_heads * a.head_dim
    kv = key_len * a.query_groups * a.head_dim
    scores = a.num_attention_heads * query_len * key_len
    inside = partial(Saved, shard="tp", group="core_attention")
    saves = [
        Saved(name=f"{name}.query", elements=q, shard="tp", group="attention"),
        Saved(name=f"{name}.key", elements=kv, shard="tp", group="attention", max_shards=a.query_groups),
        Saved(name=f"{name}.value", elements=kv, shard="tp", group="attention", max_shards=a.query_groups),
        inside(name=f"{name}.softmax", elements=scores, quadratic=True),
        inside(name=f"{name}.logsumexp", elements=a.num_attention_heads * query_len, itemsize=LOGSUMEXP_BYTES, flash_only=True),
    ]
    if a.attention_dropout:
        saves.append(inside(name=f"{name}.dropout_mask", elements=scores, itemsize=MASK_BYTES, quadratic=True))
        saves.append(inside(name=f"{name}.dropout", elements=scores, quadratic=True))
    return Attention(
        name=f"{name}.core_attention",
        query_len=query_len,
        key_len=key_len,
        heads=a.num_attention_heads,
        kv_heads=a.query_groups,
        head_dim=a.head_dim,
        causal=causal,
        saves=tuple(saves),
        window=window if window < key_len else 0,
        attended=float(chunk) if chunk and chunk < key_len else 0.0,
    )


def gate(name: str, elements: int) -> tuple[Op, ...]:
    """The attention's output times the sigmoid of its gate (mcore transformer/attention.py:1199): keeps both. Flash attention keeps its
    output too, which is the same tensor."""
    kept = (Saved(name=f"{name}.output_gate.{of}", elements=elements, shard="tp", group="attention") for of in ("input", "gate"))
    return (Pointwise(name=f"{name}.output_gate", elements=elements, moved=2 * READ + WRITE, shard="tp", saves=tuple(kept)),)


def projection(name: str, a: Shared, tokens: int, k: int) -> tuple[Op, ...]:
    """The attention's output of width `k` back to the hidden size, out of the tensor-parallel region."""
    saved = Saved(name=f"{name}.linear_proj.input", elements=tokens * k, shard="tp", group="attention")
    return (
        Gemm(name=f"{name}.linear_proj", role="projection", tokens=tokens, k=k, n=a.hidden_size, split="row", saves=(saved,)),
        Exit(elements=tokens * a.hidden_size),
    )


def cross_attention(a: Shared, tokens: int, context_tokens: int) -> Part:
    """Queries from the decoder, keys and values from the encoder's output (mcore transformer/attention.py:1639).

    The encoder's output is one tensor for all layers and is counted once, by the head that norms it.
    """
    name, h = "cross_attention", a.hidden_size
    q = a.num_attention_heads * a.head_dim
    kv = a.query_groups * a.head_dim
    q_input = Saved(name=f"{name}.linear_q.input", elements=tokens * h, group="attention")
    return Part(
        weights=linear_weights(f"{name}.linear_q", q, h, "column", bias=a.add_bias_linear)
        + linear_weights(f"{name}.linear_kv", 2 * kv, h, "column", bias=a.add_bias_linear)
        + linear_weights(f"{name}.linear_proj", h, q, "row", bias=a.add_bias_linear),
        ops=(
            Enter(elements=tokens * h),
            Gemm(name=f"{name}.linear_q", role="query", tokens=tokens, k=h, n=q, split="column", saves=(q_input,)),
            Enter(elements=context_tokens * h),
            Gemm(name=f"{name}.linear_kv", role="key_value", tokens=context_tokens, k=h, n=2 * kv, split="column"),
            core_attention(name, a, tokens, context_tokens, causal=False),
            *projection(name, a, tokens, q),
        ),
    )
