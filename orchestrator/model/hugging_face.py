"""A model's layers as Hugging Face's modules compute them: torch's own operations one by one, no fused kernels, the vocabulary whole.

model/describe.py describes layers as megatron-core builds them. Names of kinds, runs and edges stay; weights, bytes moved and tensors kept
change where transformers 5 (models/{gpt2,llama,bert,t5}/modeling_*.py) and DeepSpeed's AutoTP differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from orchestrator.model.describe import layers, tower
from orchestrator.model.ops import ACTIVATIONS, NORMS
from orchestrator.model.spec import Architecture, Attention, Enter, Exit, Gemm, LayerSpec, ModelSpec, Op, Pointwise, Saved, Scan, Weight

RMS_NORM_MOVED: Final = 36.0
"""Bytes per element of LlamaRMSNorm and T5LayerNorm in 16 bits: to fp32 2+4, square 4+4, mean 4, times rsqrt 4+4, back 4+2, weight 2+2; the
statistics are small. A fused norm moves 4."""
RMS_NORM_NORMALISED: Final = 2
"""Bytes of the normalised 16-bit tensor that the product with the weight keeps; the fp32 copy of the input (4) is kept by the rest."""
RMS_NORM_COPY: Final = 4
T5_NORM_INPUT: Final = 2
"""Bytes of the 16-bit input that T5LayerNorm multiplies with the fp32 statistics (modeling_t5.py), and keeps beside the fp32 copy."""
ROTARY_MOVED: Final = 20.0
"""Bytes per element of apply_rotary_pos_emb: x*cos 2+2, rotate_half (negate one half, concatenate) 6, times sin 2+2, sum 4+2."""
GATED_MOVED: Final = 10.0
"""Bytes per element of act(gate) 2+2, times up 4+2; a fused kernel moves 6."""
SEPARATE_DROPOUT: Final = 4.0
"""Bytes per element of dropout and residual addition as two kernels: the dropped tensor is written and read once more."""
LOSS_MOVED: Final = 22.0
"""Bytes per logit of torch's cross-entropy on fp32 logits: cast 2+4, log_softmax reads them three times and writes 4 (more ids than a
block)."""
LOSS_MOVED_BACKWARD: Final = 30.0
"""Bytes per logit of the backward of torch's cross-entropy: the dense gradient of the chosen ids 4, log_softmax's backward reads both twice
and writes 4, cast 4+2."""

KEY_BLOCK: Final = 512
"""Keys that torch's attention on CPUs takes at once, masked or not (`on_host`)."""

VOCABULARY: Final = 1
"""`pad_to` of a vocabulary that is not padded: the mark by which the loss finds its GEMM."""

ONE_QKV: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Towers, by what `describe.tower` calls them, whose queries, keys and values one linear makes (modeling_qwen2_5_vl.py)."""
PAIRS_KEPT, STATES_KEPT, CHANNELS_KEPT, CHUNKS_KEPT, SCAN_ITEMSIZE = 3, 5, 10, 2, 4
"""fp32 tensors that transformers' Mamba-2 without mamba-ssm's kernels keeps (modeling_mamba2.py, mamba2_chunk_scan; seen by
torch.autograd.graph.saved_tensors_hooks): of all pairs in a chunk and head, of B or C repeated for each head, of the channels (those of the
gated norm among them), of the chunks' states."""
SCAN_MOVED: Final = 48.0
"""Bytes of each element of such a tensor of pairs, states or channels: fill, sum, mask, exp, product, each reads 4 and writes 4, and copies
in the order that the products want."""
SCAN_KERNELS: Final = 60
"""Kernels that one scan launches where it is made of torch's own operations, about."""

RMS_NORM_KERNELS: Final = 8
"""Kernels of an RMSNorm: cast, square, mean, plus epsilon, rsqrt, product, cast, product."""
ROTARY_KERNELS: Final = 10
"""Kernels of rotary positions, of queries and keys: two products, negation, concatenation, sum."""
GATED_KERNELS: Final = 2
QUICK_GELU_KERNELS: Final = 3
QUICK_GELU_MOVED: Final = 14.0
"""Bytes per element of x * sigmoid(1.702 x): times a number 2+2, sigmoid 2+2, product 4+2."""


def activated(op: Pointwise) -> Saved:
    """The activated gate, where a kernel of its own makes it."""
    return Saved(name="mlp.activation.output", elements=op.elements, shard=op.shard, group="mlp")


def is_gpt2(a: Architecture) -> bool:
    """Whether transformers' class for it is GPT-2's: the decoders with learned positions."""
    return a.stack == "decoder" and a.position_embedding == "learned_absolute"


def divides_head(a: Architecture) -> bool:
    """Whether AutoTP divides the head: an untied one of a model whose class has a plan for it (llama: `lm_head: colwise_gather_output`),
    which those with rotary positions have; never a tied one."""
    return not a.tie_embeddings and a.stack == "decoder" and not is_gpt2(a)


def hugging_face(model: ModelSpec) -> ModelSpec:
    """The model with the operations and kept tensors that transformers' code has for it."""
    model = _all_experts(model)
    a = model.architecture
    seeing = {} if a.vision is None else dict.fromkeys(("patches", "vision", "vision_window", "projector"), tower(a.vision))
    return replace(model, runs=tuple(replace(run, layer=_layer(run.layer, seeing.get(run.layer.kind, a))) for run in model.runs))


def on_host(model: ModelSpec) -> ModelSpec:
    """The model with the causal attention that torch has for CPUs (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: kvSplitSize). On one
    core of an AMD EPYC on 2026-11-29, torch 2.13, fp32, causal took .9 to 1.2 times as long as all pairs at 512 tokens, .64 to .76 at
    1,024 and .58 at 2,048."""

    def op_of(op: Op) -> Op:
        return replace(op, key_block=KEY_BLOCK) if isinstance(op, Attention) and op.causal else op

    def layer(spec: LayerSpec) -> LayerSpec:
        return replace(spec, ops=tuple(op_of(op) for op in spec.ops))

    return replace(model, runs=tuple(replace(run, layer=layer(run.layer)) for run in model.runs))


def _all_experts(model: ModelSpec) -> ModelSpec:
    """The model with every token going to every expert, as transformers' Llama 4 has it, most of them times a score of zero
    (modeling_llama4.py, Llama4TextMoe)."""
    a = model.architecture
    if not any(part.scores_on_input for part in a.experts):
        return model

    whole = a.with_experts(lambda part: replace(part, topk=part.num_experts) if part.scores_on_input else part)
    return replace(layers(whole, model.seq_length), architecture=a)


def _layer(layer: LayerSpec, a: Architecture) -> LayerSpec:
    weights = tuple(changed for weight in layer.weights for changed in _weight(weight, layer, a))
    return replace(layer, weights=weights, ops=tuple(_ops(layer, a)))


def _weight(weight: Weight, layer: LayerSpec, a: Architecture) -> Iterator[Weight]:
    gated = [op for op in layer.ops if isinstance(op, Gemm)] if a.gated and not _fuses_linears(a) else []
    if a.stack == "encoder_decoder" and weight.pad_to and len(weight.shape) == 1:
        return  # T5ForConditionalGeneration's head has none
    if weight.pad_to:
        split = 0 if layer.kind == "head" and divides_head(a) else None
        yield replace(weight, split=split, pad_to=0)
    elif weight.kind == "dense" and any(op.role == "fc1" and (op.n, op.k)[: len(weight.shape)] == weight.shape for op in gated):
        half = replace(weight, shape=(weight.shape[0] // 2, *weight.shape[1:]))
        yield from (replace(half, name=f"{weight.name}.{name}") for name in ("gate", "up"))
    else:
        yield weight


def _fuses_linears(a: Architecture) -> bool:
    """Whether transformers' class has queries, keys and values, and gates and what they let through, in one linear each."""
    return is_gpt2(a) or a.family == "phi3"


def _ops(layer: LayerSpec, a: Architecture) -> Iterator[Op]:
    pending: Enter | None = None
    for op in layer.ops:
        if isinstance(op, Enter):
            pending = op
        elif isinstance(op, Exit):
            if layer.kind != "embedding":
                yield op
        elif isinstance(op, Gemm):
            if op.pad_to:
                yield from _head(op, pending, a)
            else:
                # Under AutoTP each linear all-reduces its input's gradient by itself (module_inject/layers.py).
                for gemm in _linears(op, a):
                    if pending is not None:
                        yield pending
                    yield gemm
            pending = None
        elif isinstance(op, Scan):
            yield from _scan(op)
        elif isinstance(op, Attention) and a.family in ONE_QKV:
            # The values that it keeps are a view of what the one linear makes, all of which stays.
            whole = Saved(name="qkv", elements=op.elements - op.key_len * op.kv_heads * op.head_dim, shard="tp", group="attention")
            yield replace(op, saves=(*op.saves, whole))
        elif isinstance(op, Pointwise):
            yield from _pointwise(op, a)
        else:
            yield op


def _scan(op: Scan) -> Iterator[Op]:
    """One scan as torch's operations compute it, without kernels of its own: B and C repeated for each head, and everything in fp32 in
    memory. (What goes from chunk to chunk is one more product of all pairs of chunks there, 7% of the scan's at 32 chunks, and is left
    out.)"""
    given, states, channels = op.saves[0], op.heads * op.state, op.heads * op.head_dim
    convolved = channels + 2 * op.groups * op.state
    sizes = (("pairs", op.tokens * op.chunk * op.heads, PAIRS_KEPT), ("states", op.tokens * states, STATES_KEPT),
             ("channels", op.tokens * channels, CHANNELS_KEPT),
             ("chunks", -(-op.tokens // op.chunk) * channels * op.state, CHUNKS_KEPT))  # fmt: skip
    kept = (replace(given, name=f"{op.name}.{name}", elements=count * size, itemsize=SCAN_ITEMSIZE) for name, size, count in sizes)
    saves = (given, replace(given, name=f"{op.name}.convolved", elements=op.tokens * convolved), *kept)
    yield replace(op, groups=op.heads, saves=saves)
    moved = sum(size for name, size, _ in sizes if name != "chunks")
    yield from _kernels(Pointwise(name=f"{op.name}.torch", elements=moved, moved=SCAN_MOVED, shard="tp"), SCAN_KERNELS)


def _linears(op: Gemm, a: Architecture) -> Iterator[Gemm]:
    """The linears that megatron-core fuses to one, all on the input that the first keeps."""
    kv = a.query_groups * a.head_dim
    widths = [op.n]
    if _fuses_linears(a) or (op.role == "qkv" and a.family in ONE_QKV):
        pass
    elif op.role == "qkv":
        widths = [op.n - 2 * kv, kv, kv]
    elif op.role == "key_value":
        widths = [kv, kv]
    elif op.role == "fc1" and a.gated:
        widths = [op.n // 2, op.n // 2]
    for index, n in enumerate(widths):
        yield replace(op, n=n, saves=() if index else op.saves)


def _kept_of_gated(op: Pointwise, a: Architecture) -> Iterator[Saved]:
    """What separate kernels keep beside the fused one: the activated gate; of experts also what they make of a token, which the product
    with their scores keeps, and which is as long as what was sent to them."""
    yield replace(activated(op), name=f"{op.name}.output")
    if op.role == "routed_activation":
        routed = op.elements // a.experts[0].ffn_hidden_size
        yield Saved(name="moe.output", elements=routed * a.hidden_size, shard="tp", group="mlp")


def _kernels(op: Pointwise, count: int) -> Iterator[Pointwise]:
    """An operation of `count` kernels: the first stands for the bytes of all, the others for their launches."""
    yield op
    for _ in range(count - 1):
        yield Pointwise(name=op.name, role=op.role, elements=0, moved=0.0, shard=op.shard)


def _head(op: Gemm, enter: Enter | None, a: Architecture) -> Iterator[Op]:
    """Logits of the whole vocabulary on every rank. Where AutoTP divides the head it gathers them: half the bytes of an all-reduce."""
    if divides_head(a):
        if enter is not None:
            yield enter
        yield replace(op, pad_to=VOCABULARY)
        yield Exit(elements=op.tokens * op.n // 2)
    else:
        yield replace(op, pad_to=VOCABULARY, split=None)


def _pointwise(op: Pointwise, a: Architecture) -> Iterator[Pointwise]:
    if op.role == "scan_norm":
        yield from _kernels(replace(op, moved=RMS_NORM_MOVED + GATED_MOVED, saves=()), RMS_NORM_KERNELS + GATED_KERNELS)
    elif op.role == "loss":
        yield replace(op, moved=LOSS_MOVED, moved_backward=LOSS_MOVED_BACKWARD, shard="none")
    elif op.role == "rotary":
        yield from _kernels(replace(op, moved=ROTARY_MOVED), ROTARY_KERNELS)
    elif op.role in ACTIVATIONS and a.gated:
        yield from _kernels(replace(op, moved=GATED_MOVED, saves=(*op.saves, *_kept_of_gated(op, a))), GATED_KERNELS)
    elif op.role in ACTIVATIONS and a.activation == "quick_gelu":
        kept_too = replace(activated(op), name=f"{op.name}.sigmoid")
        yield from _kernels(replace(op, moved=QUICK_GELU_MOVED, saves=(*op.saves, kept_too)), QUICK_GELU_KERNELS)
    elif op.role == "residual_add" and a.hidden_dropout:
        yield from _kernels(replace(op, moved=op.moved + SEPARATE_DROPOUT), 2)
    elif op.role in NORMS and a.normalization == "RMSNorm":
        kept: tuple[Saved, ...] = (
            replace(op.saves[0], itemsize=RMS_NORM_COPY),
            replace(op.saves[0], name=f"{op.name}.normalised", itemsize=RMS_NORM_NORMALISED, for_weight=True),
        )
        if a.stack == "encoder_decoder":
            kept = (*kept, replace(op.saves[0], name=f"{op.name}.narrow", itemsize=T5_NORM_INPUT))
        yield from _kernels(replace(op, moved=RMS_NORM_MOVED, saves=kept), RMS_NORM_KERNELS)
    else:
        yield op
