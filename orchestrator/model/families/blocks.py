"""What transformer layers are made of: norms, linears, attention, MLP, as weights and operations for one sample.

Weights have the names and the orientation, (out, in), of megatron-core 0.16.1's own modules (local layer specs), so that they can be
compared one by one. Saved tensors follow Korthikanti et al. (arXiv 2205.05198), section 4 and figure 2.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from orchestrator.model.spec import (
    Architecture,
    Attention,
    Enter,
    Exit,
    Gemm,
    LayerSpec,
    Op,
    Pointwise,
    Saved,
    Weight,
)

MASK_BYTES: Final = 1
"""A dropout mask has one byte an element (Korthikanti, section 4)."""
LOGSUMEXP_BYTES: Final = 4
"""Flash attention keeps the logsumexp of each row of scores in fp32 (Dao, arXiv 2307.08691, algorithm 1)."""

READ: Final = 2.0
WRITE: Final = 2.0
"""Bytes of one element in the 2-byte dtype that `Pointwise.moved` counts in."""
CROSS_ENTROPY_MOVED_BACKWARD: Final = 14.0
"""Its backward (cross_entropy.py:108-150): scale by the loss's gradient in place 4+4, cast to the logits' dtype 4+2."""
CROSS_ENTROPY_MOVED: Final = 38.0
"""Bytes per logit of mcore's unfused loss (tensor_parallel/cross_entropy.py:21-93): to fp32 2+4, max 4, subtract 4+4, exp 4+4, sum 4,
divide 4+4."""


class Part(NamedTuple):
    """A piece of a layer."""

    weights: tuple[Weight, ...] = ()
    ops: tuple[Op, ...] = ()


def layer(kind: str, *parts: Part, input_elements: int, output_elements: int, recomputable: bool = True) -> LayerSpec:
    """The pieces in the order in which they run."""
    return LayerSpec(
        kind=kind,
        weights=tuple(weight for part in parts for weight in part.weights),
        ops=tuple(op for part in parts for op in part.ops),
        input_elements=input_elements,
        output_elements=output_elements,
        recomputable=recomputable,
    )


def norm(name: str, a: Architecture, tokens: int) -> Part:
    """LayerNorm (weight, bias) or RMSNorm (weight). Saves its input; the output is saved by the GEMM that takes it."""
    names = ("weight", "bias") if a.normalization == "LayerNorm" else ("weight",)
    elements = tokens * a.hidden_size
    saved = Saved(name=f"{name}.input", elements=elements, group="residual")
    return Part(
        weights=tuple(Weight(name=f"{name}.{suffix}", shape=(a.hidden_size,), kind="norm") for suffix in names),
        ops=(Pointwise(name=name, elements=elements, moved=READ + WRITE, saves=(saved,)),),
    )


def linear_weights(name: str, n: int, k: int, split: Literal["column", "row"] | None, *, bias: bool) -> tuple[Weight, ...]:
    """(n, k) and a bias of n: a column-parallel linear divides both over n, a row-parallel one divides k and replicates the bias."""
    weights = [Weight(name=f"{name}.weight", shape=(n, k), split={"column": 0, "row": 1, None: None}[split])]
    if bias:
        weights.append(Weight(name=f"{name}.bias", shape=(n,), split=0 if split == "column" else None))
    return tuple(weights)


def residual_add(name: str, a: Architecture, tokens: int) -> Part:
    """Bias, dropout and residual in one kernel: reads x and the residual, writes the sum (and the mask)."""
    elements = tokens * a.hidden_size
    if not a.hidden_dropout:
        return Part(ops=(Pointwise(name=name, elements=elements, moved=2 * READ + WRITE),))
    mask = Saved(name=f"{name}.mask", elements=elements, itemsize=MASK_BYTES, group="dropout", dropout_only=True)
    return Part(ops=(Pointwise(name=name, elements=elements, moved=2 * READ + WRITE + MASK_BYTES, saves=(mask,)),))


def core_attention(name: str, a: Architecture, query_len: int, key_len: int, *, causal: bool) -> Attention:
    """Q, K, V are saved always; the softmax, its dropout's mask and output only where the scores are materialised; the logsumexp only
    by flash attention, whose output is the projection's saved input."""
    q = query_len * a.num_attention_heads * a.head_dim
    kv = key_len * a.query_groups * a.head_dim
    scores = a.num_attention_heads * query_len * key_len
    saves = [
        Saved(name=f"{name}.query", elements=q, shard="tp", group="attention"),
        Saved(name=f"{name}.key", elements=kv, shard="tp", group="attention", max_shards=a.query_groups),
        Saved(name=f"{name}.value", elements=kv, shard="tp", group="attention", max_shards=a.query_groups),
        Saved(name=f"{name}.softmax", elements=scores, shard="tp", group="core_attention", quadratic=True),
        Saved(
            name=f"{name}.logsumexp",
            elements=a.num_attention_heads * query_len,
            shard="tp",
            itemsize=LOGSUMEXP_BYTES,
            group="core_attention",
            flash_only=True,
        ),
    ]
    if a.attention_dropout:
        mask = Saved(
            name=f"{name}.dropout_mask",
            elements=scores,
            shard="tp",
            itemsize=MASK_BYTES,
            group="core_attention",
            quadratic=True,
            dropout_only=True,
        )
        output = Saved(name=f"{name}.dropout", elements=scores, shard="tp", group="core_attention", quadratic=True, dropout_only=True)
        saves += [mask, output]
    return Attention(
        name=f"{name}.core_attention",
        query_len=query_len,
        key_len=key_len,
        heads=a.num_attention_heads,
        kv_heads=a.query_groups,
        head_dim=a.head_dim,
        causal=causal,
        saves=tuple(saves),
    )


def _projection(name: str, a: Architecture, tokens: int) -> tuple[Op, ...]:
    """The attention's output back to the hidden size, out of the tensor-parallel region."""
    k = a.num_attention_heads * a.head_dim
    saved = Saved(name=f"{name}.linear_proj.input", elements=tokens * k, shard="tp", group="attention")
    return (
        Gemm(name=f"{name}.linear_proj", tokens=tokens, k=k, n=a.hidden_size, split="row", saves=(saved,)),
        Exit(elements=tokens * a.hidden_size),
    )


def self_attention(a: Architecture, tokens: int, *, causal: bool) -> Part:
    """Fused QKV, rotary embedding where the model has it, attention, projection (mcore transformer/attention.py:1264)."""
    name, h = "self_attention", a.hidden_size
    q = a.num_attention_heads * a.head_dim
    kv = a.query_groups * a.head_dim
    qkv_input = Saved(name=f"{name}.linear_qkv.input", elements=tokens * h, group="norm")
    rotary = Pointwise(name=f"{name}.rotary", elements=tokens * (q + kv), moved=READ + WRITE, shard="tp")
    return Part(
        weights=linear_weights(f"{name}.linear_qkv", q + 2 * kv, h, "column", bias=a.add_bias_linear or a.add_qkv_bias)
        + linear_weights(f"{name}.linear_proj", h, q, "row", bias=a.add_bias_linear),
        ops=(
            Enter(elements=tokens * h),
            Gemm(name=f"{name}.linear_qkv", tokens=tokens, k=h, n=q + 2 * kv, split="column", saves=(qkv_input,)),
            *((rotary,) if a.position_embedding == "rope" else ()),
            core_attention(name, a, tokens, tokens, causal=causal),
            *_projection(name, a, tokens),
        ),
    )


def cross_attention(a: Architecture, tokens: int, context_tokens: int) -> Part:
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
            Gemm(name=f"{name}.linear_q", tokens=tokens, k=h, n=q, split="column", saves=(q_input,)),
            Enter(elements=context_tokens * h),
            Gemm(name=f"{name}.linear_kv", tokens=context_tokens, k=h, n=2 * kv, split="column"),
            core_attention(name, a, tokens, context_tokens, causal=False),
            *_projection(name, a, tokens),
        ),
    )


def mlp(a: Architecture, tokens: int) -> Part:
    """Two linears with an activation between; a gated one has twice the first projection and saves gate, up and their product.

    ReLU's backward needs only its output, which the second linear keeps anyway.
    """
    h, f = a.hidden_size, a.ffn_hidden_size
    n = 2 * f if a.gated else f
    fc1_input = Saved(name="mlp.linear_fc1.input", elements=tokens * h, group="mlp_norm")
    act_input = Saved(name="mlp.activation.input", elements=tokens * n, shard="tp", group="mlp")
    fc2_input = Saved(name="mlp.linear_fc2.input", elements=tokens * f, shard="tp", group="mlp")
    moved = (2 * READ if a.gated else READ) + WRITE
    return Part(
        weights=linear_weights("mlp.linear_fc1", n, h, "column", bias=a.add_bias_linear)
        + linear_weights("mlp.linear_fc2", h, f, "row", bias=a.add_bias_linear),
        ops=(
            Enter(elements=tokens * h),
            Gemm(name="mlp.linear_fc1", tokens=tokens, k=h, n=n, split="column", saves=(fc1_input,)),
            Pointwise(
                name="mlp.activation", elements=tokens * f, moved=moved, shard="tp", saves=() if a.activation == "relu" else (act_input,)
            ),
            Gemm(name="mlp.linear_fc2", tokens=tokens, k=f, n=h, split="row", saves=(fc2_input,)),
            Exit(elements=tokens * h),
        ),
    )


def transformer_layer(kind: str, a: Architecture, tokens: int, *, causal: bool, context_tokens: int = 0) -> LayerSpec:
    """Pre-norm: attention, cross-attention where there is a context, MLP, each with norm and residual."""
    elements = tokens * a.hidden_size
    cross = (
        norm("pre_cross_attn_layernorm", a, tokens),
        cross_attention(a, tokens, context_tokens),
        residual_add("cross_attn_bda", a, tokens),
    )
    return layer(
        kind,
        norm("input_layernorm", a, tokens),
        self_attention(a, tokens, causal=causal),
        residual_add("self_attn_bda", a, tokens),
        *(cross if context_tokens else ()),
        norm("pre_mlp_layernorm", a, tokens),
        mlp(a, tokens),
        residual_add("mlp_bda", a, tokens),
        input_elements=elements,
        output_elements=elements,
    )


def embedding(a: Architecture, tokens: int, *, output_tokens: int | None = None) -> LayerSpec:
    """Token, position and segment tables, then dropout (mcore language_model_embedding.py). Only the token table is divided by tp.

    `tokens`: all that are looked up; `output_tokens`: those whose vectors enter the next layer (an encoder-decoder looks up both sides).
    Takes token ids: `input_elements` 0, nothing crosses a boundary before it.
    """
    h = a.hidden_size
    elements = tokens * h
    weights = [
        Weight(name="word_embeddings.weight", shape=(a.vocab_size, h), split=0, kind="embedding", pad_to=a.make_vocab_size_divisible_by)
    ]
    ops: list[Op] = [Pointwise(name="word_embeddings", elements=elements, moved=READ + WRITE, shard="none"), Exit(elements=elements)]
    if a.position_embedding == "learned_absolute":
        weights.append(Weight(name="position_embeddings.weight", shape=(a.max_position_embeddings, h), kind="embedding"))
        ops.append(Pointwise(name="position_embeddings", elements=elements, moved=2 * READ + WRITE, shard="none"))
    if a.num_token_types:
        weights.append(Weight(name="tokentype_embeddings.weight", shape=(a.num_token_types, h), kind="embedding"))
        ops.append(Pointwise(name="tokentype_embeddings", elements=elements, moved=2 * READ + WRITE, shard="none"))
    if a.hidden_dropout:
        mask = Saved(name="embedding_dropout.mask", elements=elements, itemsize=MASK_BYTES, group="dropout", dropout_only=True)
        ops.append(Pointwise(name="embedding_dropout", elements=elements, moved=READ + WRITE + MASK_BYTES, saves=(mask,)))
    out = (tokens if output_tokens is None else output_tokens) * h
    return layer("embedding", Part(tuple(weights), tuple(ops)), input_elements=0, output_elements=out, recomputable=False)


def vocabulary_head(a: Architecture, tokens: int, *, prefix: str = "output_layer", bias: bool = False) -> Part:
    """Hidden states to logits over the padded vocabulary, and the loss."""
    h, v, pad_to = a.hidden_size, a.vocab_size, a.make_vocab_size_divisible_by
    weights = [Weight(name=f"{prefix}.weight", shape=(v, h), split=0, kind="embedding", pad_to=pad_to, tied=a.tie_embeddings)]
    if bias:
        weights.append(Weight(name=f"{prefix}.bias", shape=(v,), split=0, pad_to=pad_to))
    saved = Saved(name=f"{prefix}.input", elements=tokens * h, group="norm")
    return Part(
        weights=tuple(weights),
        ops=(
            Enter(elements=tokens * h),
            Gemm(name=prefix, tokens=tokens, k=h, n=v, split="column", pad_to=pad_to, saves=(saved,)),
            Pointwise(
                name="cross_entropy",
                elements=tokens * v,
                moved=CROSS_ENTROPY_MOVED,
                shard="tp",
                moved_backward=CROSS_ENTROPY_MOVED_BACKWARD,
            ),
        ),
    )


def head(a: Architecture, tokens: int, *parts: Part) -> LayerSpec:
    """The last layer: final norm, whatever comes before the vocabulary, logits and loss. Gives one loss per token, nothing to carry on."""
    return layer("head", *parts, input_elements=tokens * a.hidden_size, output_elements=0, recomputable=False)
