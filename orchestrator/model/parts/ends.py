"""Where a model begins and ends: embeddings; the language-model head and its loss; what BERT and T5 have before it; token prediction beyond
the next one."""

from __future__ import annotations

from typing import Final

from orchestrator.model.ops import Enter, Exit, Gemm, Op, Pointwise, Saved, Weight
from orchestrator.model.parts.part import MASK_BYTES, READ, WRITE, Part, linear_weights, norm
from orchestrator.model.shared import Shared

CROSS_ENTROPY_MOVED_BACKWARD: Final = 14.0
"""Bytes moved per logit by the backward of mcore's unfused loss (cross_entropy.py:108-150): scale by the loss's gradient in place 4+4, cast
to the logits' dtype 4+2."""
CROSS_ENTROPY_MOVED: Final = 38.0
"""Bytes per logit of mcore's unfused loss (tensor_parallel/cross_entropy.py:21-93): to fp32 2+4, max 4, subtract 4+4, exp 4+4, sum 4,
divide 4+4."""
RELATIVE_BUCKETS: Final = 32
RELATIVE_MAX_DISTANCE: Final = 128
"""Buckets and largest distance in tokens of T5's relative attention bias: Raffel et al. (arXiv 1910.10683), section 2.1, and the defaults
of mcore's T5Model."""


def embedding(a: Shared, tokens: int) -> Part:
    """Token, position and segment tables, then dropout (mcore language_model_embedding.py). Only the token table is divided by tp. An
    encoder-decoder looks up both sides' tokens; with relative positions, its two bias tables serve all layers of a side."""
    h = a.hidden_size
    elements = tokens * h
    weights = [
        Weight(name="word_embeddings.weight", shape=(a.vocab_size, h), split=0, kind="embedding", pad_to=a.make_vocab_size_divisible_by)
    ]
    ops: list[Op] = [Pointwise(name="word_embeddings", elements=elements, moved=READ + WRITE, shard="none"), Exit(elements=elements)]
    if a.embedding_norm:
        normed = norm("word_embeddings.norm", a, tokens)
        weights, ops = [*weights, *normed.weights], [*ops, *normed.ops]
    if a.position_embedding == "learned_absolute":
        weights.append(Weight(name="position_embeddings.weight", shape=(a.max_position_embeddings, h), kind="embedding"))
        ops.append(Pointwise(name="position_embeddings", elements=elements, moved=2 * READ + WRITE, shard="none"))
    if a.num_token_types:
        weights.append(Weight(name="tokentype_embeddings.weight", shape=(a.num_token_types, h), kind="embedding"))
        ops.append(Pointwise(name="tokentype_embeddings", elements=elements, moved=2 * READ + WRITE, shard="none"))
    if a.hidden_dropout:
        mask = Saved(name="embedding_dropout.mask", elements=elements, itemsize=MASK_BYTES, group="dropout")
        ops.append(Pointwise(name="embedding_dropout", elements=elements, moved=READ + WRITE + MASK_BYTES, saves=(mask,)))
    if a.position_embedding == "relative":
        table, shape = "relative_pos_emb.relative_attention_bias.weight", (RELATIVE_BUCKETS, a.num_attention_heads)
        weights += [Weight(name=f"{side}_{table}", shape=shape, kind="embedding") for side in ("encoder", "decoder")]
    return Part(tuple(weights), tuple(ops))


def embedding_copy(a: Shared) -> Weight:
    """The token table once more, where layers of multi-token prediction stand on another stage than the first (mcore gpt_model.py:149)."""
    shape = (a.vocab_size, a.hidden_size)
    return Weight(
        name="embedding.word_embeddings.weight", shape=shape, split=0, kind="embedding", pad_to=a.make_vocab_size_divisible_by, tied=True
    )


def logits(a: Shared, tokens: int, prefix: str = "output_layer") -> tuple[Op, ...]:
    """Hidden states to logits over the padded vocabulary, and the loss."""
    h, v = a.hidden_size, a.vocab_size
    saved = Saved(name=f"{prefix}.input", elements=tokens * h, group="norm")
    loss = Pointwise(name="cross_entropy", role="loss", elements=tokens * v, moved=CROSS_ENTROPY_MOVED, shard="tp",
                     moved_backward=CROSS_ENTROPY_MOVED_BACKWARD)  # fmt: skip
    return (
        Enter(elements=tokens * h),
        Gemm(name=prefix, tokens=tokens, k=h, n=v, split="column", pad_to=a.make_vocab_size_divisible_by, saves=(saved,)),
        loss,
    )


def vocabulary_head(a: Shared, tokens: int, *, prefix: str = "output_layer", bias: bool = False) -> Part:
    """The output matrix, tied to the embedding or not, logits and loss."""
    h, v, pad_to = a.hidden_size, a.vocab_size, a.make_vocab_size_divisible_by
    weights = [Weight(name=f"{prefix}.weight", shape=(v, h), split=0, kind="embedding", pad_to=pad_to, tied=a.tie_embeddings)]
    if bias:
        weights.append(Weight(name=f"{prefix}.bias", shape=(v,), split=0, pad_to=pad_to))
    return Part(tuple(weights), logits(a, tokens, prefix))


def masked_head_transform(a: Shared, tokens: int) -> Part:
    """BERT's dense and GELU before its vocabulary, replicated over tp (mcore bert_lm_head.py:33); under sequence parallelism each rank does
    its tokens."""
    h = a.hidden_size
    elements = tokens * h
    dense_input = Saved(name="lm_head.dense.input", elements=elements, group="norm")
    gelu_input = Saved(name="lm_head.gelu.input", elements=elements, group="mlp")
    return Part(
        weights=linear_weights("lm_head.dense", h, h, None, bias=True),
        ops=(
            Gemm(name="lm_head.dense", role="dense", tokens=tokens, k=h, n=h, saves=(dense_input,)),
            Pointwise(name="lm_head.gelu", elements=elements, moved=READ + WRITE, saves=(gelu_input,)),
        ),
    )


def encoder_output(a: Shared, seq_length: int) -> Part:
    """The encoder's final norm, which mcore's T5Model does in the block that has `post_process`. Its output is kept once, as the input of
    every decoder layer's keys and values."""
    weights, ops = norm("encoder.final_layernorm", a, seq_length)
    kept = Saved(name="encoder_output", elements=seq_length * a.hidden_size, group="residual")
    return Part(weights, (*ops, Pointwise(name="encoder_output", elements=0, moved=0.0, saves=(kept,))))


def prediction_entry(name: str, a: Shared, tokens: int) -> Part:
    """What a layer of multi-token prediction does before its transformer layer (mcore multi_token_prediction.py): norms of the hidden state
    and of the next token's vector, and a linear of both."""
    h = a.hidden_size
    saved = Saved(name=f"{name}.eh_proj.input", elements=tokens * 2 * h, group="norm")
    enorm, hnorm = norm(f"{name}.enorm", a, tokens), norm(f"{name}.hnorm", a, tokens)
    return Part(
        weights=enorm.weights + hnorm.weights + linear_weights(f"{name}.eh_proj", h, 2 * h, "column", bias=False),
        ops=(
            *enorm.ops,
            *hnorm.ops,
            Enter(elements=tokens * 2 * h),
            Gemm(name=f"{name}.eh_proj", tokens=tokens, k=2 * h, n=h, split="column", saves=(saved,)),
            Exit(elements=tokens * h),
        ),
    )
