"""Weights by shape and split, operations by size, saved tensors by element count: what parts of a model are described with.

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

from math import lcm, prod
from typing import ClassVar, Final, Literal, Self

from msgspec.structs import replace

from orchestrator.model.routing import Routing
from orchestrator.values import Value

Shard = Literal["tp", "sequence", "none"]
WeightKind = Literal["dense", "expert", "embedding", "norm"]
Role = Literal[
    "", "input_norm", "mlp_norm", "norm", "scan_norm", "residual_add",
    "qkv", "query", "key_value", "latent_query", "query_down", "query_up", "key_value_down", "key_value_up",
    "in_projection", "out_projection", "rotary", "core_attention", "projection", "dense",
    "fc1", "activation", "fc2", "mlp_adapter",
    "router", "permute", "routed_fc1", "routed_activation", "routed_fc2", "shared_fc1", "shared_activation", "shared_fc2",
    "loss",
]  # fmt: skip
"""What an operation is in its layer. Prices, recompute, transformers' modules and adapters treat operations by it; names are for people,
and nothing depends on them. "norm" is any norm but those before the mixer and before the feed-forward, "scan_norm" a state space's gated
one; "dense" is the linear of BERT's head."""
ROUTED: Final[frozenset[Role]] = frozenset({"routed_fc1", "routed_activation", "routed_fc2"})
"""Roles of the operations of experts that each see a part of the tokens."""
SHARED: Final[frozenset[Role]] = frozenset({"shared_fc1", "shared_activation", "shared_fc2"})
"""Roles of the operations of shared experts, which see all tokens."""
FEED_FORWARD: Final[frozenset[Role]] = frozenset({"fc1", "activation", "fc2", "mlp_adapter", "router", "permute", *ROUTED, *SHARED})
NORMS: Final[frozenset[Role]] = frozenset({"input_norm", "mlp_norm", "norm"})
"""Roles of norms, whether over the hidden size or over a head's width."""
ACTIVATIONS: Final[frozenset[Role]] = frozenset({"activation", "routed_activation", "shared_activation"})


def padded(size: int, pad_to: int, tp: int) -> int:
    """A vocabulary as it is allocated: the next multiple of `pad_to` that tp divides. The same for every tp that divides `pad_to`, so that
    such layouts train the same model (Megatron's own default, a multiple of `pad_to * tp`, is another model at each tp).

    >>> [padded(50257, 128, tp) for tp in (1, 2, 8)], padded(50257, 128, 3)
    ([50304, 50304, 50304], 50304)
    """
    unit = lcm(pad_to, tp)
    return -(-size // unit) * unit


class Weight(Value, frozen=True, kw_only=True, omit_defaults=True):
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
    """Whether it shares its storage with the embedding when both are on one pipeline stage; otherwise the stage holds a copy."""
    frozen: bool = False
    """Whether the weight is not trained: it then has neither gradient nor optimizer states."""

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


class Saved(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor kept for the backward pass, per sample. `itemsize` None: the compute dtype's.

    `group` names the recompute that drops it: "core_attention" (Megatron's selective recompute: scores and logsumexp, not q, k, v),
    "mlp" (what the activation makes and takes), "expert_activation" (what that of experts makes), "up_projected" (queries, keys and
    values of latent attention), "norm" and "mlp_norm" (outputs of the norms before attention and MLP, which are inputs of
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
    flash_only: bool = False
    """Whether it exists only with flash (fused) attention: its logsumexp."""
    for_weight: bool = False
    """Whether it is kept for the gradient of a weight alone, and not at all where that weight is frozen."""
    max_shards: int = 0
    """The most tp shards that can differ (keys and values of few query groups are replicated beyond it); 0: no bound."""

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


class Gemm(Value, frozen=True, kw_only=True, tag="gemm", omit_defaults=True):
    """(tokens x k) @ (k x n) per sample; "column" divides n by tp, "row" divides k. Forward FLOPs: 2 * tokens * k * n."""

    name: str
    role: Role = ""
    tokens: int
    k: int
    n: int
    split: Literal["column", "row"] | None = None
    pad_to: int = 0
    saves: tuple[Saved, ...] = ()
    experts: int = 0
    """Experts of a grouped product, one (tokens / experts) x k by k x n each, where `tokens` counts every token for each expert it goes to;
    experts are divided by ep, and "column" and "row" by etp in place of tp. 0: a plain product."""
    routing: Routing | None = None
    """How unevenly tokens come to the experts of a grouped product; None: evenly."""
    frozen: bool = False
    """Whether the weight is not trained: backward then has the gradient of the input alone."""
    bits: Literal[4, 8] | None = None
    """Bits that bitsandbytes holds a frozen weight in (`Lora.bits`); None: those of the training."""
    wide: bool = False
    """Whether it takes 16 bits in a training whose products take fewer, as the vocabulary's projection always does."""
    forward_only: bool = False
    """Whether nothing below it is trained either, so that it has no backward pass at all."""

    def of_piece(self, pieces: int) -> Self:
        """The operation for the largest of `pieces` pieces of the sequence."""
        return replace(self, tokens=-(-self.tokens // pieces))


class Attention(Value, frozen=True, kw_only=True, tag="attention", omit_defaults=True):
    """softmax(Q K^T) V per sample; heads are divided by tp unless they stay `whole`.
    Forward FLOPs: 4 * query_len * key_len * heads * head_dim, times `visible` where the kernel skips what is masked."""

    role: ClassVar[Role] = "core_attention"
    name: str
    query_len: int
    key_len: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    saves: tuple[Saved, ...] = ()
    window: int = 0
    """Keys that a query sees at most, its own and those before it (sliding window), only with `causal`; 0: all."""
    whole: bool = False
    """Whether every tensor-parallel rank computes all heads: what comes before and after it is then not divided."""
    forward_only: bool = False
    """Whether nothing below it is trained, so that it has no backward pass at all."""
    attended: float = 0.0
    """Tokens that a token's sample has, in the mean over tokens, where the sequence is packed with samples that don't see each other, or
    tokens of a chunk where it is made of chunks; only with `causal`. 0: neither."""
    alone: float = 1.0
    """Samples of a packed sequence, in the mean, each of which is computed by kernels of its own, without flash attention."""
    key_block: int = 0
    """Keys that the kernel takes at once, computing the pairs of a block that are masked, too; only with `causal`. 0: few."""

    @property
    def visible(self) -> float:
        """Share of all pairs of query and key that are computed, in the limit of long sequences: what the mask leaves, and the rest of its
        blocks.

        >>> Attention(name="a", query_len=8, key_len=8, heads=1, kv_heads=1, head_dim=1, causal=True).visible
        0.5
        >>> Attention(name="a", query_len=8, key_len=8, heads=1, kv_heads=1, head_dim=1, causal=True, window=2).visible
        0.21875
        >>> Attention(name="a", query_len=8, key_len=8, heads=1, kv_heads=1, head_dim=1, causal=True, key_block=4).visible
        0.75
        """
        if not self.causal:
            return 1.0
        seen = min(self.window or self.key_len, self.key_len) / self.key_len
        visible = seen * (1 - seen / 2)
        if self.attended:
            visible = min(visible, self.attended / self.key_len / 2)
        return min(1.0, visible + self.key_block / self.key_len / 2)

    @property
    def elements(self) -> int:
        """Elements of queries, keys and values together, per sample."""
        return (self.query_len * self.heads + 2 * self.key_len * self.kv_heads) * self.head_dim


class Scan(Value, frozen=True, kw_only=True, tag="scan", omit_defaults=True):
    """The recurrence of a selective state space over one sample, chunk by chunk ("state space duality", Dao and Gu, arXiv 2405.21060,
    section 6): heads of `head_dim` channels with a state of `state` numbers a channel; the heads of a group share what goes into the
    state (B) and what is read of it (C). Heads and groups are divided by tp."""

    role: ClassVar[Role] = ""
    name: str
    tokens: int
    heads: int
    head_dim: int
    state: int
    groups: int
    chunk: int
    """Tokens within which all pairs are computed; from chunk to chunk only the state goes on."""
    saves: tuple[Saved, ...] = ()

    @property
    def products(self) -> tuple[int, int, int, int]:
        """Forward FLOPs of its four matrix products, chunk by chunk (section 6.3): C B of all pairs in a chunk, times the inputs, the
        chunk's contribution to the state, and what is read of the state that enters.

        >>> Scan(name="s", tokens=4, heads=2, head_dim=3, state=5, groups=1, chunk=2).products
        (80, 96, 240, 240)
        """
        pairs, channels = self.tokens * self.chunk, self.heads * self.head_dim
        through = 2 * self.tokens * channels * self.state
        return 2 * pairs * self.groups * self.state, 2 * pairs * channels, through, through

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward pass: two gradients of each product, after C B and the chunks' states have been made again, which nothing
        keeps (mamba-ssm, ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_bwd).

        >>> Scan(name="s", tokens=4, heads=2, head_dim=3, state=5, groups=1, chunk=2).backward_flops == 2 * 656 + 80 + 240
        True
        """
        pairs, _, into, _ = self.products
        return 2 * sum(self.products) + pairs + into

    @property
    def elements(self) -> int:
        """Elements of 16 bits that are read and written in forward by mamba-ssm's kernels (ops/triton/ssd_combined.py at e9594ce,
        _mamba_chunk_scan_combined_fwd): inputs by two, the gate and both outputs (channels each), B and C by two each, the steps, C B of
        all pairs in fp32 written and read, the chunks' states written in fp32, passed on and read in 16 bits.

        >>> Scan(name="s", tokens=4, heads=2, head_dim=3, state=5, groups=1, chunk=2).elements
        600
        """
        return self._elements(5, 4, 4, 6) + self.tokens * self.heads

    @property
    def backward_elements(self) -> int:
        """Elements of 16 bits that are read and written in backward, whose fifteen kernels make C B and the states again and keep gradients
        of states in fp32 until they are passed on (_mamba_chunk_scan_combined_bwd).

        >>> Scan(name="s", tokens=4, heads=2, head_dim=3, state=5, groups=1, chunk=2).backward_elements
        1904
        """
        return self._elements(17, 19, 12, 17)

    def _elements(self, channels: int, shared: int, pairs: int, states: int) -> int:
        """16-bit elements of so many passes over tensors of channels, of B or C, of C B, and of all chunks' states."""
        width, chunks = self.heads * self.head_dim, -(-self.tokens // self.chunk)
        by_token = channels * width + self.groups * (shared * self.state + pairs * self.chunk)
        return self.tokens * by_token + states * chunks * width * self.state

    @property
    def model_flops(self) -> int:
        """FLOPs of the recurrence itself, token by token, as Megatron-LM counts them (megatron/training/training.py:291, core_v0.16.1): 7
        for each number of the state.

        >>> Scan(name="s", tokens=4, heads=2, head_dim=3, state=5, groups=1, chunk=2).model_flops
        840
        """
        return 7 * self.tokens * self.heads * self.head_dim * self.state


class DeltaRule(Value, frozen=True, kw_only=True, tag="delta_rule", omit_defaults=True):
    """The gated delta rule over one sample, chunk by chunk (Gated DeltaNet, arXiv 2412.06464, section 3.3, in the kernels of
    flash-linear-attention, ops/gated_delta_rule/chunk.py): each head has a state of `key_dim` x `value_dim` that decays, forgets what it
    holds under a token's key and learns its value. Keys and queries that several heads share are repeated before it. Heads are divided
    by tp."""

    role: ClassVar[Role] = ""
    name: str
    tokens: int
    heads: int
    """Heads of the values."""
    key_dim: int
    value_dim: int
    chunk: int
    """Tokens within which all pairs are computed; from chunk to chunk only the state goes on."""
    saves: tuple[Saved, ...] = ()

    @property
    def products(self) -> tuple[int, ...]:
        """Forward FLOPs of its matrix products, chunk by chunk: keys with keys and queries with keys of all pairs in a chunk; that triangle
        solved (a third of its cube); its inverse times keys and times values; queries' scores times values; and what the state that
        enters takes from the values, gives to the queries and learns.

        >>> DeltaRule(name="d", tokens=6, heads=2, key_dim=4, value_dim=5, chunk=3).products
        (288, 288, 36, 288, 360, 360, 480, 480, 480)
        """
        rows = self.tokens * self.heads
        keys, values = 2 * rows * self.chunk * self.key_dim, 2 * rows * self.chunk * self.value_dim
        state = 2 * rows * self.key_dim * self.value_dim
        return keys, keys, rows * self.chunk**2 // 3, keys, values, values, state, state, state

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward pass: two gradients of each product (of the inverse two products of whole triangles), after the queries'
        scores, the inverse's products and the states have been made again, which nothing keeps (chunk_gated_delta_rule_bwd).

        >>> DeltaRule(name="d", tokens=6, heads=2, key_dim=4, value_dim=5, chunk=3).backward_flops == 2 * 3024 + 432 + 288 + 648 + 960
        True
        """
        keys, _, inverse, _, values, _, state, *_ = self.products
        of_inverse = 4 * self.tokens * self.heads * self.chunk**2
        return 2 * (sum(self.products) - inverse) + of_inverse + keys + (keys + values) + 2 * state

    @property
    def elements(self) -> int:
        """Elements of 16 bits that are read and written in forward: keys by four kernels, queries and the decayed keys (written once, read
        once) by one; values, corrected values and the output written or read six times in all; the triangle twice in fp32 and twice in 16
        bits; each chunk's state written and read. (Its gates are a number a head and token, and are left out.)

        >>> DeltaRule(name="d", tokens=6, heads=2, key_dim=4, value_dim=5, chunk=3).elements
        1072
        """
        chunks = -(-self.tokens // self.chunk)
        token = 7 * self.key_dim + 6 * self.value_dim + 6 * self.chunk
        return self.heads * (self.tokens * token + 2 * chunks * self.key_dim * self.value_dim)

    @property
    def backward_elements(self) -> int:
        """Elements that are read and written in backward: each and its gradient."""
        return 2 * self.elements

    @property
    def model_flops(self) -> int:
        """FLOPs of the recurrence itself, token by token, as Megatron-LM counts them (megatron/training/training.py:494, core_v0.16.1): 8
        for each number of the state.

        >>> DeltaRule(name="d", tokens=6, heads=2, key_dim=4, value_dim=5, chunk=3).model_flops
        1920
        """
        return 8 * self.tokens * self.heads * self.key_dim * self.value_dim


class Pointwise(Value, frozen=True, kw_only=True, tag="pointwise", omit_defaults=True):
    """A memory-bound operation on `elements` per sample, moving `moved` bytes per element in forward (reads + writes at 2-byte dtype)."""

    name: str
    role: Role = ""
    elements: int
    moved: float
    shard: Shard = "sequence"
    saves: tuple[Saved, ...] = ()
    moved_backward: float | None = None
    """Bytes moved per element in backward where they are known; None: the cost model's usual share of the forward's."""
    routing: Routing | None = None
    """How unevenly tokens come to the experts whose tensors these are; None: evenly, or they are no experts'."""

    def of_piece(self, pieces: int) -> Self:
        """The operation for the largest of `pieces` pieces of the sequence."""
        return replace(self, elements=-(-self.elements // pieces))


class Enter(Value, frozen=True, kw_only=True, tag="enter"):
    """The input (`elements` per sample) of a tensor-parallel region: identity forward and all-reduce backward, or under sequence
    parallelism all-gather forward, reduce-scatter backward, and one more all-gather for the weight gradient."""

    role: ClassVar[Role] = ""
    saves: ClassVar[tuple[Saved, ...]] = ()
    elements: int


class Exit(Value, frozen=True, kw_only=True, tag="exit"):
    """The output of a tensor-parallel region: all-reduce forward, or reduce-scatter forward and all-gather backward."""

    role: ClassVar[Role] = ""
    saves: ClassVar[tuple[Saved, ...]] = ()
    elements: int


class Dispatch(Value, frozen=True, kw_only=True, tag="dispatch"):
    """`elements` per sample (tokens x hidden size) go to `topk` experts each and come back (all-to-all over ep)."""

    role: ClassVar[Role] = ""
    saves: ClassVar[tuple[Saved, ...]] = ()
    elements: int
    topk: int
    routing: Routing | None = None
    """How unevenly tokens go to the experts; None: evenly."""
    limit: tuple[int, int] = (1, 1)
    """Groups of experts, and in how many of them all of a token's experts are."""


class Exchange(Value, frozen=True, kw_only=True, tag="exchange", omit_defaults=True):
    """What Megatron-Bridge's adapter of a linear that tensor parallelism divides sends beside that linear (model/lora.py): `elements` per
    sample of its input, of what is between its matrices of a linear divided by columns or by rows, or of its output
    (strategy/axes/tp.py says by which operations)."""

    role: Role = ""
    saves: ClassVar[tuple[Saved, ...]] = ()
    of: Literal["input", "columns", "rows", "output"]
    elements: int
    shared: bool = False
    """Whether an input is that of a linear with a norm before it, which hands over what it gathers."""


Op = Gemm | Attention | Scan | DeltaRule | Pointwise | Enter | Exit | Exchange | Dispatch
