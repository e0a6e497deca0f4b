"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen linears of transformers' modules, as peft 0.21 computes them
(peft/tuners/lora/layer.py, Linear.forward), and of megatron-core's, as Megatron-Bridge does (067f987, megatron/bridge/peft), or ms-swift's
mcore-bridge (1.6.5, tuners/lora.py):
y = W x + (alpha / rank) B A dropout(x), with A of (rank, in) and B of (out, rank).

A frozen weight has no gradient and no optimizer state at any ZeRO stage, its product has no gradient of the weight, and its input is not
kept for one; the adapter on it keeps that input instead, or with dropout a dropped copy of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from math import prod
from typing import Annotated, Final, Literal

from msgspec.structs import replace

from orchestrator.errors import InputError, nearest
from orchestrator.key import Key, names
from orchestrator.model.hugging_face import is_gpt2
from orchestrator.model.ops import FEED_FORWARD, ROUTED, SHARED, Role, Shard
from orchestrator.model.parts.part import MASK_BYTES, READ, WRITE
from orchestrator.model.parts.vision import part_of
from orchestrator.model.spec import Architecture, Enter, Exchange, Exit, Gemm, LayerSpec, ModelSpec, Op, Pointwise, Saved, Weight
from orchestrator.values import Value

ALL: Final = "all-linear"
"""Every linear but the output layer: peft's own word for it."""
MCORE_BRIDGE: Final = "mcore-bridge"
WRITTEN: Final = {"megatron-bridge": "bridge", MCORE_BRIDGE: "ms_swift"}
"""What `write=` is of the program that trains the adapters of each library beside megatron-core's linears."""
ADAPTED: Final[tuple[Role, ...]] = ("qkv", "projection", "fc1", "fc2")
"""Products of a layer whose linears may have adapters."""
MEGATRON_LINEARS: Final[dict[Role, str]] = {
    "qkv": "linear_qkv", "projection": "linear_proj", "fc1": "linear_fc1", "fc2": "linear_fc2",
    "routed_fc1": "linear_fc1", "routed_fc2": "linear_fc2", "shared_fc1": "linear_fc1", "shared_fc2": "linear_fc2",
    "latent_query": "linear_q_proj", "query_down": "linear_q_down_proj", "query_up": "linear_q_up_proj",
    "key_value_down": "linear_kv_down_proj", "key_value_up": "linear_kv_up_proj", "in_projection": "in_proj", "out_projection": "out_proj",
}  # fmt: skip
"""megatron-core's linears that adapters of Megatron-Bridge go to, by their operation's role: each product is one linear there."""
NORMED: Final = frozenset({"qkv", "fc1", "query_up", "key_value_up", "in_projection"})
"""Roles of those that are one module of Transformer Engine with the norm before them (core/models/gpt/gpt_layer_specs.py)."""
NF4_BYTES: Final = 4 / 8 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a frozen weight in 4 bits: 64 share a scale of 8 bits, and 256 of those one of 32 (arXiv 2305.14314, section 3)."""
INT8_SCALE_BYTES: Final = 4
"""Bytes of the scale of a row of 8-bit weights, one of a linear's outputs (bitsandbytes 0.50, functional.py, int8_vectorwise_quant)."""
ADDED: Final = 2 * READ + 2 * WRITE + READ
"""Bytes moved for each element of an adapted linear's output: times alpha / rank (read, write), plus the frozen one's (6)."""


class Lora(Value, frozen=True, kw_only=True):
    """Which linears have adapters, and how large these are."""

    rank: Annotated[int, Key("lora.rank", "of LoRA's adapters; without it all weights are trained", type=int, low=1, high=10**6)]
    targets: Annotated[tuple[str, ...], Key(
        "lora.targets", "linears with adapters, by their names in transformers: q_proj,v_proj; or all-linear; for engine=megatron also "
        "by Megatron's, linear_qkv,linear_proj: one adapter for a linear that is several in transformers", type=str,
        read=names)] = (ALL,)  # fmt: skip
    alpha: Annotated[
        float | None, Key("lora.alpha", "adapters count alpha / rank times", type=float, default="twice the rank", above=0)
    ] = None
    dropout: Annotated[float, Key("lora.dropout", "of the adapters' inputs", low=0, below=1)] = 0.0
    bits: Annotated[Literal[4, 8] | None, Key(
        "lora.bits", "of the frozen linears: 4 is QLoRA's NF4, 8 LLM.int8 (planned, and written for write=; its seconds are compared with "
        "no run)", type=Literal[4, 8], default="16")] = None  # fmt: skip
    """Bits of a weight of the frozen linears but the head's; None: those of the training. The bytes of weights are what bitsandbytes makes
    of them. Published is one check of them: ms-swift's runs of Qwen-7B (A100, 2,048 tokens) print 5.5 GiB less with GPTQ's int8 weights
    than with bf16's and 8.5 less with its int4; with 8 and 4 bits 6.0 and 9.0 less are priced. Their one run of bitsandbytes' NF4 prints
    3.9 less, of which peft's prepare_model_for_kbit_training, which makes embeddings and head fp32, explains 2.3. That is not priced: no
    program whose files are read does it today (LLaMA-Factory ff6d4d1, ms-swift 3602360 and the SFTTrainer of TRL f2cd577 call it nowhere,
    Axolotl 067b021 patches it to leave both as they are, monkeypatch/peft/utils.py).
    Seconds, and what bitsandbytes' functions need beside the weights, are counted from its source, and compared with no run."""

    bridge: Annotated[
        Literal["megatron-bridge", "mcore-bridge"] | None,
        Key(
            "lora.bridge",
            "whose adapters engine=megatron plans: NVIDIA's, one for all experts of a rank, or mcore-bridge, ms-swift's, one for each "
            "(write=ms_swift)",
            type=Literal["megatron-bridge", "mcore-bridge"],
            default="megatron-bridge",
        ),
    ] = None

    @property
    def write(self) -> str:
        """The program, as `write=` names it, that trains these adapters beside megatron-core's linears."""
        return WRITTEN[self.bridge or "megatron-bridge"]

    @property
    def scaling(self) -> float:
        """What an adapter's output is multiplied by.

        >>> Lora(rank=16).scaling, Lora(rank=16, alpha=8).scaling
        (2.0, 0.5)
        """
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the linears of this name have adapters."""
        return ALL in self.targets or name in self.targets

    @property
    def fused(self) -> tuple[str, ...]:
        """Targets by names that megatron-core's linears have and transformers' have not."""
        return tuple(name for name in self.targets if name in MEGATRON_LINEARS.values())


def packed_bytes(bits: Literal[4, 8], inputs: float) -> float:
    """Bytes of a weight, scales included, of a frozen linear with so many inputs.

    >>> packed_bytes(8, 4096)
    1.0009765625
    """
    return NF4_BYTES if bits == 4 else 1 + INT8_SCALE_BYTES / inputs


def linear_names(a: Architecture) -> dict[Role, tuple[str, ...]]:
    """The last names of the linears in transformers' modules, by the role of the product that they make up between them, in order."""
    if is_gpt2(a):
        words = ("c_attn", "c_proj", "c_fc", "c_proj")
    elif a.stack == "encoder":
        words = ("query key value", "dense", "dense", "dense")
    elif a.stack == "encoder_decoder":
        words = ("q k v", "o", "wi_0 wi_1" if a.gated else "wi", "wo")
    elif a.family == "phi3":
        words = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    else:
        words = ("q_proj k_proj v_proj", "o_proj", "gate_proj up_proj" if a.gated else "up_proj", "down_proj")
    found: dict[Role, tuple[str, ...]] = {role: tuple(linears.split()) for role, linears in zip(ADAPTED, words, strict=True)}
    if a.stack == "encoder_decoder":
        found |= {"query": ("q",), "key_value": ("k", "v")}
    if a.stack == "encoder":
        found["dense"] = ("dense",)
    return found


def target_names(a: Architecture, lora: Lora) -> tuple[str, ...]:
    """The names of all linears with adapters, each once."""
    found = dict.fromkeys(name for linears in linear_names(a).values() for name in linears)
    return tuple(name for name in found if lora.adapts(name))


def check_targets(a: Architecture, lora: Lora) -> None:
    """Raises InputError for a target that is no linear of this model in transformers, nor in megatron-core."""
    known = tuple(dict.fromkeys(name for linears in linear_names(a).values() for name in linears))
    fused = lora.fused if a.stack == "decoder" else ()
    if lora.bridge == MCORE_BRIDGE and not fused and ALL not in lora.targets:
        linears = tuple(dict.fromkeys(MEGATRON_LINEARS.values()))
        raise InputError("lora.targets", ",".join(lora.targets), f"lora.bridge={MCORE_BRIDGE} has Megatron's linears", [ALL, *linears])
    if fused and len(fused) < len(lora.targets):
        raise InputError("lora.targets", ",".join(lora.targets), f"{', '.join(fused)} are Megatron's linears, the others transformers'")
    for target in lora.targets:
        if target not in (ALL, *known, *fused):
            close = nearest(target, known)
            why = f"is no linear of transformers' {a.family} models{f'; did you mean {close}?' if close else ''}"
            raise InputError("lora.targets", target, why, [ALL, *known])
    if not lora.targets:
        raise InputError("lora.targets", "", "names no linear", [ALL, *known])


def with_lora(model: ModelSpec, lora: Lora, *, modules: bool = True) -> ModelSpec:
    """A model as transformers builds it (`modules`, model/hugging_face.py), or as megatron-core does, frozen, with adapters. transformers'
    head is whole on every rank: a partition by name of linears with adapters has no output that is gathered (DeepSpeed's autotp_config.py).
    What looks at images has no adapters."""
    runs = []
    for run in model.runs:
        below = not modules and run.layer.kind == "embedding"
        if below or (model.images is not None and part_of(run.layer.kind) != "language"):  # nothing below the adapters is trained
            runs.append(replace(run, layer=replace(frozen_layer(run.layer), forward_only=True)))
            continue
        how = _Adapting if modules else _AdaptingSwift if lora.bridge == MCORE_BRIDGE else _AdaptingMegatron
        ops = how(linear_names(model.architecture), lora)
        new = tuple(changed for op in run.layer.ops for changed in ops.of(op, run.layer))
        frozen = tuple(replace(weight, frozen=True) for weight in run.layer.weights)
        if modules and run.layer.kind == "head":
            new = tuple(replace(op, split=None) if isinstance(op, Gemm) else op for op in new if not isinstance(op, Enter | Exit))
            frozen = tuple(replace(weight, split=None) for weight in frozen)
        runs.append(replace(run, layer=replace(run.layer, ops=new, weights=(*frozen, *ops.weights))))
    return replace(model, runs=tuple(runs))


def frozen_layer(layer: LayerSpec, keeping: Collection[Role] = ()) -> LayerSpec:
    """The layer with all of its weights frozen: its products have no gradient of a weight, and keep no input for one but those of
    the roles `keeping`."""
    frozen = _Adapting({}, Lora(rank=1))
    ops = tuple(
        replace(changed, saves=op.saves) if isinstance(changed, Gemm) and changed.role in keeping else changed
        for op in layer.ops
        for changed in frozen.of(op, layer)
    )
    return replace(layer, ops=ops, weights=tuple(replace(weight, frozen=True) for weight in layer.weights))


def trainable_parameters(model: ModelSpec) -> int:
    """Elements of the weights that are trained, in the whole model; tied ones once."""
    return sum(run.count * prod(w.shape) for run in model.runs for w in run.layer.weights if not w.frozen and not w.tied)


class _Adapting:
    """One layer's operations, one after the other."""

    def __init__(self, linears: dict[Role, tuple[str, ...]], lora: Lora) -> None:
        self._linears, self._lora = linears, lora
        self._met: dict[str, int] = {}
        self._inputs: dict[str, tuple[Saved, ...]] = {}
        self.weights: list[Weight] = []

    def of(self, op: Op, layer: LayerSpec) -> Iterator[Op]:
        """The frozen operation, and its adapters where it has any."""
        if isinstance(op, Gemm):
            yield from self._linear(op, layer)
        elif isinstance(op, Pointwise) and layer.kind == "embedding":
            yield replace(op, moved_backward=0.0)
        elif isinstance(op, Pointwise):
            # A norm keeps the normalised tensor for its weight's gradient alone.
            yield replace(op, saves=tuple(saved for saved in op.saves if not saved.for_weight))
        else:
            yield op

    def _adapted(self, op: Gemm, _: LayerSpec) -> list[tuple[str, int]]:
        """The linears with adapters among those of a product, by name, and the width of their outputs. Linears that follow each other
        under one name take the same input, which the first is said to keep."""
        index = self._met.get(op.name, 0)
        self._met[op.name] = index + 1
        if index == 0:
            self._inputs[op.name] = op.saves
        linears = self._linears.get(op.role, ())
        return [(linears[index], op.n)] if linears and self._lora.adapts(linears[index]) else []

    def _linear(self, op: Gemm, layer: LayerSpec) -> Iterator[Op]:
        adapted = self._adapted(op, layer)
        kept: tuple[Saved, ...] = ()
        if op.role == "projection" and not (adapted and not self._lora.dropout):
            kept = tuple(replace(saved, flash_only=True) for saved in op.saves)  # fused attention keeps its output itself
        bits = self._lora.bits if op.role in self._linears else None
        if bits == 8:
            # MatMul8bitLt keeps its input even where its weight is frozen (bitsandbytes 0.50, autograd/_functions.py:187).
            kept, self._inputs[op.name] = self._inputs.get(op.name, ()), ()
        yield replace(op, frozen=True, saves=kept, bits=bits)
        for name, width in adapted:
            yield from self._adapter(replace(op, n=width), f"{op.name}.{name}")

    def _adapter(self, op: Gemm, name: str) -> Iterator[Op]:
        """Tensor parallelism divides B as it divides a linear's outputs, and A as it divides its inputs, so that what is added has the
        linear's own layout; between the two the ranks sum `rank` elements a token, of the gradient or of the product. Each expert has an
        adapter of its own."""
        rank, tokens, routed = self._lora.rank, op.tokens, op.role in ROUTED
        role = self._role(op)
        columns, rows = (op.split == side and not routed for side in ("column", "row"))
        weight = partial(Weight, kind="expert" if routed else "dense")
        each = (op.experts,) * routed
        self.weights += [
            weight(name=f"{name}.lora_A.weight", shape=(*each, rank, op.k), split=1 if rows else None),
            weight(name=f"{name}.lora_B.weight", shape=(*each, op.n, rank), split=0 if columns else None),
        ]
        taken: Shard = "tp" if rows or routed else "sequence"
        dropout, inputs = self._dropped(op, name, role, taken)
        yield from dropout
        product = partial(Gemm, role=role, tokens=tokens, wide=True, experts=op.experts, routing=op.routing)
        yield product(name=f"{name}.lora_A", k=op.k, n=rank, split="row" if rows else None, saves=inputs)
        if rows:
            yield Exit(elements=tokens * rank)
        if columns:
            yield Enter(elements=tokens * rank)
        middle = Saved(name=f"{name}.lora_B.input", elements=tokens * rank, shard="tp" if routed else "sequence")
        yield product(name=f"{name}.lora_B", k=rank, n=op.n, split="column" if columns else None, saves=(middle,))
        yield from self._added(op, name, role, "tp" if columns or routed else "sequence")

    def _role(self, op: Gemm) -> Role:
        """The role of the adapter of a product."""
        return op.role if op.role in ROUTED | SHARED else "mlp_adapter" if op.role in FEED_FORWARD else ""

    def _dropped(self, op: Gemm, name: str, role: Role, shard: Shard) -> tuple[list[Op], tuple[Saved, ...]]:
        """Dropout of an adapter's input, where there is any, and what the adapter's first product keeps."""
        if not self._lora.dropout:
            return [], self._inputs.pop(op.name, ())
        taken = op.tokens * op.k
        mask = Saved(name=f"{name}.dropout.mask", elements=taken, itemsize=MASK_BYTES, group="dropout", shard=shard)
        moved = READ + WRITE + MASK_BYTES
        dropout = Pointwise(name=f"{name}.dropout", role=role, elements=taken, moved=moved, shard=shard, saves=(mask,))
        return [dropout], (Saved(name=f"{name}.lora_A.input", elements=taken, group="dropout", shard=shard),)

    def _added(self, op: Gemm, name: str, role: Role, shard: Shard) -> Iterator[Op]:
        yield Pointwise(name=f"{name}.lora_scale", role=role, elements=0, moved=0.0)  # a kernel of its own
        yield Pointwise(name=f"{name}.lora_add", role=role, elements=op.tokens * op.n, moved=ADDED, shard=shard)


class _AdaptingMegatron(_Adapting):
    """A layer's operations with Megatron-Bridge's adapters: its LoRA's, or by transformers' names CanonicalLoRA's. They are linears of
    megatron-core's own, of 16 bits. Not priced: that the first layer's input needs no gradient, and that gradients of the adapter which
    experts share are summed over ep."""

    def of(self, op: Op, layer: LayerSpec) -> Iterator[Op]:
        for changed in super().of(op, layer):
            # A router keeps its input whether it is trained or not (core/transformer/moe/moe_utils.py, RouterGatingLinearFunction).
            yield replace(changed, saves=op.saves) if isinstance(changed, Gemm) and changed.role == "router" else changed

    def _adapted(self, op: Gemm, layer: LayerSpec) -> list[tuple[str, int]]:
        self._inputs[op.name] = op.saves
        known, lora = MEGATRON_LINEARS.get(op.role), self._lora
        if known is None:
            return []
        if lora.adapts(known) and lora.fused:
            return [(known, op.n)]
        role: Role = "fc1" if known == "linear_fc1" else "fc2" if known == "linear_fc2" else op.role
        names = self._linears.get(role, (known,))
        if len(names) == 1 or op.role in ROUTED:  # experts' two sides have one adapter (canonical_lora.py, _should_treat_linear_fc1_as_...)
            return [(known, op.n)] if any(map(lora.adapts, names)) else []
        keys = sum(one.kv_heads * one.head_dim for one in layer.attentions[:1])
        widths = (op.n - 2 * keys, keys, keys) if role == "qkv" else (op.n // 2, op.n // 2)
        return [(name, width) for name, width in zip(names, widths, strict=True) if lora.adapts(name)]

    def _adapter(self, op: Gemm, name: str) -> Iterator[Op]:
        """Tensor parallelism divides both matrices (peft/utils.py, ParallelLinearAdapter): A of a linear divided by rows by its inputs, all
        others by their outputs. All of a rank's experts share one adapter, which every rank has (share_expert_adapters, Bridge's own)."""
        rank, tokens, routed = self._lora.rank, op.tokens, op.role in ROUTED
        role, split = self._role(op), None if routed else op.split
        columns, rows, whole = split == "column", split == "row", None if routed else 0
        self.weights += [
            Weight(name=f"{name}.lora_A.weight", shape=(rank, op.k), split=1 if rows else whole),
            Weight(name=f"{name}.lora_B.weight", shape=(op.n, rank), split=whole),
        ]
        taken: Shard = "none" if columns else "tp" if rows or routed else "sequence"
        dropout, inputs = self._dropped(op, name, role, taken)
        yield from dropout
        if columns:
            yield Exchange(of="input", role=role, elements=tokens * op.k, shared=op.role in NORMED)
            inputs = tuple(replace(saved, shard=taken) for saved in inputs)
        product = partial(Gemm, role=role, tokens=tokens, wide=True)
        yield product(name=f"{name}.lora_A", k=op.k, n=rank, split=split, saves=inputs)
        if columns or rows:
            yield Exchange(of="columns" if columns else "rows", role=role, elements=tokens * rank)
        middle = Saved(name=f"{name}.lora_B.input", elements=tokens * rank, shard="none" if split else taken)
        yield product(name=f"{name}.lora_B", k=rank, n=op.n, split="column" if split else None, saves=(middle,))
        if rows:
            yield Exchange(of="output", role=role, elements=tokens * op.n)
        yield from self._added(op, name, role, "tp" if columns or routed else "sequence")


class _AdaptingSwift(_AdaptingMegatron):
    """A layer's operations with mcore-bridge's adapters, of Megatron's linears as they are: divided as peft's, one for each expert."""

    def _adapted(self, op: Gemm, layer: LayerSpec) -> list[tuple[str, int]]:
        self._inputs[op.name] = op.saves
        known = MEGATRON_LINEARS.get(op.role)
        return [(known, op.n)] if known is not None and self._lora.adapts(known) else []

    _adapter = _Adapting._adapter
