"""A transformer as plain numbers: weights by shape and split, operations by size, saved tensors by element count.

All sizes are those of the whole model for ONE sample (one sequence); the cost model multiplies by the micro-batch size and divides
by the parallel degrees. Tensors of a token's size or less (norm statistics, token ids) are left out, as in Korthikanti et al.
(arXiv 2205.05198, section 4); so are the logits and the softmax of the loss, which `Traits.logits_bytes` counts.
`shard` and `split` say which degree divides what:

* "tp": divided by the tensor-parallel size, always;
* "sequence": divided by the tensor-parallel size only under Megatron's sequence parallelism;
* "none": every tensor-parallel rank holds the whole.

Every saved tensor has a token dimension and is also divided by the context-parallel size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import lcm, prod
from typing import Literal

from orchestrator.values import Value

Shard = Literal["tp", "sequence", "none"]
WeightKind = Literal["dense", "expert", "embedding", "norm"]


class Architecture(Value, frozen=True, kw_only=True):
    """The facts that define a model, independent of how it is trained. Families turn them into layers.

    `num_layers` counts the decoder's layers (gpt, llama), the encoder's (bert) or the encoder's of a t5, whose decoder has
    `decoder_num_layers`. `vocab_size` is unpadded.
    """

    family: str
    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    decoder_num_layers: int = 0
    num_query_groups: int | None = None
    """Key/value heads; None: as many as attention heads."""
    kv_channels: int | None = None
    """Width of one head; None: hidden_size / num_attention_heads."""
    activation: Literal["gelu", "swiglu", "geglu", "relu"] = "gelu"
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    position_embedding: Literal["learned_absolute", "rope", "relative", "none"] = "learned_absolute"
    rotary_base: int = 10000
    rope_scaling_factor: float | None = None
    """Llama-3 style frequency scaling; None: none."""
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    tie_embeddings: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    make_vocab_size_divisible_by: int = 128
    num_token_types: int = 0
    """Segment embeddings (bert)."""

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: twice the first projection."""
        return self.activation in ("swiglu", "geglu")


def padded(size: int, pad_to: int, tp: int) -> int:
    """A vocabulary as it is allocated: the next multiple of `pad_to` that tp divides. The same for every tp that divides `pad_to`, so that
    such layouts train the same model (Megatron's own default, a multiple of `pad_to * tp`, is another model at each tp).

    >>> [padded(50257, 128, tp) for tp in (1, 2, 8)], padded(50257, 128, 3)
    ([50304, 50304, 50304], 50304)
    """
    unit = lcm(pad_to, tp)
    return -(-size // unit) * unit


class Weight(Value, frozen=True, kw_only=True):
    """One parameter tensor of the whole model.

    `split` is the dimension that tensor parallelism divides (None: replicated). Where `pad_to` > 0 that dimension is first padded
    (the vocabulary, `padded`).

    >>> Weight(name="word_embeddings", shape=(50257, 1600), split=0, kind="embedding", pad_to=128).local_shape(2)
    (25152, 1600)
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    kind: WeightKind = "dense"
    pad_to: int = 0
    tied: bool = False
    """Shares its storage with the embedding when both are on one pipeline stage; otherwise the stage holds a copy."""

    def padded_shape(self, tp: int) -> tuple[int, ...]:
        """The whole tensor as the engine allocates it at this tensor-parallel size."""
        if self.split is None or not self.pad_to:
            return self.shape
        shape = list(self.shape)
        shape[self.split] = padded(shape[self.split], self.pad_to, tp)
        return tuple(shape)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """What one tensor-parallel rank holds. Raises ValueError when tp does not divide the split dimension."""
        shape = list(self.padded_shape(tp))
        if self.split is not None:
            if shape[self.split] % tp:
                raise ValueError(f"{self.name}: tp={tp} does not divide {shape[self.split]}")
            shape[self.split] //= tp
        return tuple(shape)

    def local_numel(self, tp: int) -> int:
        """Elements on one tensor-parallel rank."""
        return prod(self.local_shape(tp))


class Saved(Value, frozen=True, kw_only=True):
    """A tensor kept for the backward pass, per sample. `itemsize` None: the compute dtype's.

    `group` names the recompute that drops it: "core_attention" (Megatron's selective recompute: scores and logsumexp, not q, k, v),
    "mlp" (what the activation makes and takes), "norm" and "mlp_norm" (outputs of the norms before attention and MLP, which are inputs of
    GEMMs); "attention" (q, k, v, the inputs of the projection and of cross-attention), "residual" (inputs of norms) and "dropout" (hidden
    masks) go only with the whole layer.
    `quadratic`: exists only without flash (fused) attention; its element count has the product of two sequence lengths.
    """

    name: str
    elements: int
    shard: Shard = "sequence"
    itemsize: int | None = None
    group: str = ""
    quadratic: bool = False
    dropout_only: bool = False
    """A dropout mask or a dropout's output: saved only where the dropout probability is above zero. Families leave it out where the
    architecture's probability is zero (torch returns the input itself then), so nothing has to be filtered."""
    flash_only: bool = False
    """Exists only with flash (fused) attention: its logsumexp."""
    max_shards: int = 0
    """At most this many different tp shards (keys and values of few query groups are replicated beyond it); 0: no bound."""

    def local_elements(self, tp: int = 1, *, sequence_parallel: bool = False, cp: int = 1) -> float:
        """Elements on one rank, per sample.

        >>> Saved(name="key", elements=1024, shard="tp", max_shards=8).local_elements(16)
        128.0
        >>> Saved(name="norm_input", elements=1024).local_elements(16, sequence_parallel=True)
        64.0
        """
        parts = 1
        if self.shard == "tp":
            parts = min(tp, self.max_shards) if self.max_shards else tp
        elif self.shard == "sequence" and sequence_parallel:
            parts = tp
        return self.elements / (parts * cp)

    def exists(self, *, flash_attention: bool) -> bool:
        """Whether this attention keeps the tensor."""
        return not (self.quadratic if flash_attention else self.flash_only)


class Gemm(Value, frozen=True, kw_only=True, tag="gemm"):
    """(tokens x k) @ (k x n) per sample; "column" divides n by tp, "row" divides k. Forward FLOPs: 2 * tokens * k * n."""

    name: str
    tokens: int
    k: int
    n: int
    split: Literal["column", "row"] | None = None
    pad_to: int = 0
    saves: tuple[Saved, ...] = ()
    experts: int = 0
    """Above 0: a grouped product, one (tokens / experts) x k by k x n an expert; `tokens` counts every token for each expert it goes to,
    experts are divided by ep and never by tp (etp = 1)."""


class Attention(Value, frozen=True, kw_only=True, tag="attention"):
    """softmax(Q K^T) V per sample; heads are divided by tp. Forward FLOPs: 4 * query_len * key_len * heads * head_dim, half if causal
    and the kernel skips the masked half."""

    name: str
    query_len: int
    key_len: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    saves: tuple[Saved, ...] = ()

    @property
    def elements(self) -> int:
        """Of queries, keys and values together, per sample."""
        return (self.query_len * self.heads + 2 * self.key_len * self.kv_heads) * self.head_dim


class Pointwise(Value, frozen=True, kw_only=True, tag="pointwise"):
    """A memory-bound operation on `elements` per sample, moving `moved` bytes per element in forward (reads + writes at 2-byte dtype)."""

    name: str
    elements: int
    moved: float
    shard: Shard = "sequence"
    saves: tuple[Saved, ...] = ()
    moved_backward: float | None = None
    """The same in backward where it is known; None: the cost model's usual share of the forward's."""


class Enter(Value, frozen=True, kw_only=True, tag="enter"):
    """The input (`elements` per sample) of a tensor-parallel region: identity forward and all-reduce backward, or under sequence
    parallelism all-gather forward, reduce-scatter backward, and one more all-gather for the weight gradient."""

    elements: int


class Exit(Value, frozen=True, kw_only=True, tag="exit"):
    """The output of a tensor-parallel region: all-reduce forward, or reduce-scatter forward and all-gather backward."""

    elements: int


class Dispatch(Value, frozen=True, kw_only=True, tag="dispatch"):
    """`elements` per sample (tokens x hidden size) go to `topk` experts each and come back (all-to-all over ep)."""

    elements: int
    topk: int


Op = Gemm | Attention | Pointwise | Enter | Exit | Dispatch


class LayerSpec(Value, frozen=True, kw_only=True):
    """One kind of layer. `input_elements` per sample is what enters (what full recompute keeps, what a pipeline boundary before it
    carries); `output_elements` what leaves. `recomputable`: engines recompute transformer layers, never the embedding or the head."""

    kind: str
    weights: tuple[Weight, ...]
    ops: tuple[Op, ...]
    input_elements: int
    output_elements: int
    recomputable: bool = True

    def local_parameters(self, tp: int, *, with_tied: bool = True) -> int:
        """Parameters of this layer on one tensor-parallel rank."""
        return sum(w.local_numel(tp) for w in self.weights if with_tied or not w.tied)

    def saved(self, *, flash_attention: bool) -> Iterator[Saved]:
        """What the layer keeps for its backward pass with this attention."""
        for op in self.ops:
            if isinstance(op, Gemm | Attention | Pointwise):
                yield from (saved for saved in op.saves if saved.exists(flash_attention=flash_attention))

    def saved_bytes(
        self,
        tp: int = 1,
        *,
        sequence_parallel: bool = False,
        cp: int = 1,
        itemsize: int = 2,
        flash_attention: bool = True,
        without: Collection[str] = (),
    ) -> float:
        """Bytes kept for backward on one rank, per sample; `without`: the groups that are recomputed."""
        return sum(
            saved.local_elements(tp, sequence_parallel=sequence_parallel, cp=cp) * (saved.itemsize or itemsize)
            for saved in self.saved(flash_attention=flash_attention)
            if saved.group not in without
        )

    @property
    def parameters(self) -> int:
        """Parameters of the whole layer, unpadded, tied copies not counted."""
        return sum(prod(w.shape) for w in self.weights if not w.tied)


class LayerRun(Value, frozen=True, kw_only=True):
    """`count` identical layers in a row."""

    layer: LayerSpec
    count: int


class Edge(Value, frozen=True, kw_only=True):
    """A tensor that rides along: `elements` per sample made by the last layer of kind `source`, needed by every `target` layer."""

    name: str
    source: str
    target: str
    elements: int


class ModelSpec(Value, frozen=True, kw_only=True):
    """An architecture at a sequence length: runs of identical layers, embedding first and head last."""

    architecture: Architecture
    seq_length: int
    decoder_seq_length: int | None = None
    runs: tuple[LayerRun, ...]
    edges: tuple[Edge, ...] = ()

    def layers(self) -> Iterator[LayerSpec]:
        """Every layer in order."""
        for run in self.runs:
            for _ in range(run.count):
                yield run.layer

    @property
    def num_layers(self) -> int:
        """All layers, embedding and head included."""
        return sum(run.count for run in self.runs)

    def kind(self, name: str) -> LayerSpec:
        """The layer of this kind. Raises KeyError."""
        for run in self.runs:
            if run.layer.kind == name:
                return run.layer
        raise KeyError(name)

    @property
    def parameters(self) -> int:
        """Unpadded parameters of the whole model; tied weights once. Published totals are compared with this."""
        return sum(run.layer.parameters * run.count for run in self.runs)

    @property
    def tokens_per_sample(self) -> int:
        """What tokens/s counts: the sequence, or encoder plus decoder tokens of an encoder-decoder."""
        return self.seq_length + (self.decoder_seq_length or 0)
