"""Low-rank adapters (LoRA, arXiv 2106.09685) beside the frozen linears of transformers' modules, as peft 0.21 computes them
(peft/tuners/lora/layer.py, Linear.forward): y = W x + (alpha / rank) B A dropout(x), with A of (rank, in) and B of (out, rank).

A frozen weight has no gradient and no optimizer state at any ZeRO stage, its product has no gradient of the weight, and its input is not
kept for one; the adapter on it keeps that input instead, or with dropout a dropped copy of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import Annotated, Final, Literal

from msgspec.structs import replace

from orchestrator.errors import InputError, nearest
from orchestrator.key import Key, names
from orchestrator.model.hugging_face import is_gpt2
from orchestrator.model.ops import FEED_FORWARD, Role
from orchestrator.model.parts.part import MASK_BYTES, READ, WRITE
from orchestrator.model.parts.vision import part_of
from orchestrator.model.spec import Architecture, Enter, Exit, Gemm, LayerSpec, ModelSpec, Op, Pointwise, Saved, Weight
from orchestrator.values import Value

ALL: Final = "all-linear"
"""Every linear but the output layer: peft's own word for it."""
ADAPTED: Final[tuple[Role, ...]] = ("qkv", "projection", "fc1", "fc2")
"""Products of a layer whose linears may have adapters."""
NF4_BYTES: Final = 4 / 8 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a frozen weight in 4 bits: 64 share a scale of 8 bits, and 256 of those one of 32 (arXiv 2305.14314, section 3)."""
INT8_SCALE_BYTES: Final = 4
"""Bytes of the scale of a row of 8-bit weights, one of a linear's outputs (bitsandbytes 0.50, functional.py, int8_vectorwise_quant)."""
ADDED: Final = 2 * READ + 2 * WRITE + READ
"""Bytes moved for each element of an adapted linear's output: times alpha / rank (read, write), plus the frozen one's (6)."""


class Lora(Value, frozen=True, kw_only=True):
    """Which linears have adapters, and how large these are."""

    rank: Annotated[int, Key("lora.rank", "of LoRA's adapters; without it all weights are trained", type=int, low=1, high=10**6)]
    targets: Annotated[
        tuple[str, ...],
        Key("lora.targets", "linears with adapters, by their names in transformers: q_proj,v_proj; or all-linear", type=str, read=names),
    ] = (ALL,)
    alpha: Annotated[
        float | None, Key("lora.alpha", "adapters count alpha / rank times", type=float, default="twice the rank", above=0)
    ] = None
    dropout: Annotated[float, Key("lora.dropout", "of the adapters' inputs", low=0, below=1)] = 0.0
    bits: Annotated[
        Literal[4, 8] | None,
        Key(
            "lora.bits",
            "of the frozen linears: 4 is QLoRA's NF4, 8 LLM.int8 (planned, and written for write=; its seconds are compared with no run)",
            type=Literal[4, 8],
            default="16",
        ),
    ] = None
    """Bits of a weight of the frozen linears but the head's; None: those of the training. The bytes of weights are what bitsandbytes makes
    of them. Published is one check of them: ms-swift's runs of Qwen-7B (A100, 2,048 tokens) print 5.5 GiB less with GPTQ's int8 weights
    than with bf16's and 8.5 less with its int4; with 8 and 4 bits 6.0 and 9.0 less are priced. Their one run of bitsandbytes' NF4 prints
    3.9 less, of which peft's prepare_model_for_kbit_training, which makes embeddings and head fp32, explains 2.3. That is not priced: no
    program whose files are read does it today (LLaMA-Factory ff6d4d1, ms-swift 3602360 and the SFTTrainer of TRL f2cd577 call it nowhere,
    Axolotl 067b021 patches it to leave both as they are, monkeypatch/peft/utils.py).
    Seconds, and what bitsandbytes' functions need beside the weights, are counted from its source, and compared with no run."""

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
    """Raises InputError for a target that is no linear of this model in transformers."""
    known = tuple(dict.fromkeys(name for linears in linear_names(a).values() for name in linears))
    for target in lora.targets:
        if target not in (ALL, *known):
            close = nearest(target, known)
            why = f"is no linear of transformers' {a.family} models{f'; did you mean {close}?' if close else ''}"
            raise InputError("lora.targets", target, why, [ALL, *known])
    if not lora.targets:
        raise InputError("lora.targets", "", "names no linear", [ALL, *known])


def with_lora(model: ModelSpec, lora: Lora, linears: dict[Role, tuple[str, ...]] | None = None) -> ModelSpec:
    """A model as transformers builds it (model/hugging_face.py), frozen, with adapters; or, with the names of its linears by product, as
    another library builds it. transformers' head is whole on every rank: a partition by name of linears with adapters has no output that is
    gathered (DeepSpeed's autotp_config.py). What looks at images has no adapters."""
    whole_head = linears is None
    linears = linears or linear_names(model.architecture)
    runs = []
    for run in model.runs:
        if model.images is not None and part_of(run.layer.kind) != "language":  # nothing below the text model's adapters is trained
            runs.append(replace(run, layer=replace(frozen_layer(run.layer), forward_only=True)))
            continue
        ops = _Adapting(linears, lora)
        new = tuple(changed for op in run.layer.ops for changed in ops.of(op, run.layer))
        frozen = tuple(replace(weight, frozen=True) for weight in run.layer.weights)
        if whole_head and run.layer.kind == "head":
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
        """The frozen operation, and its adapter where it has one."""
        if isinstance(op, Gemm):
            yield from self._linear(op)
        elif isinstance(op, Pointwise) and layer.kind == "embedding":
            yield replace(op, moved_backward=0.0)
        elif isinstance(op, Pointwise):
            # A norm keeps the normalised tensor for its weight's gradient alone.
            yield replace(op, saves=tuple(saved for saved in op.saves if not saved.for_weight))
        else:
            yield op

    def _linear(self, op: Gemm) -> Iterator[Op]:
        """Linears that follow each other under one name take the same input, which the first is said to keep."""
        index = self._met.get(op.name, 0)
        self._met[op.name] = index + 1
        if index == 0:
            self._inputs[op.name] = op.saves
        linears = self._linears.get(op.role, ())
        adapted = bool(linears) and self._lora.adapts(linears[index])
        kept: tuple[Saved, ...] = ()
        if op.role == "projection" and not (adapted and not self._lora.dropout):
            kept = tuple(replace(saved, flash_only=True) for saved in op.saves)  # fused attention keeps its output itself
        bits = self._lora.bits if linears else None
        if bits == 8:
            # MatMul8bitLt keeps its input even where its weight is frozen (bitsandbytes 0.50, autograd/_functions.py:187).
            kept, self._inputs[op.name] = self._inputs.get(op.name, ()), ()
        yield replace(op, frozen=True, saves=kept, bits=bits)
        if adapted:
            yield from self._adapter(op, f"{op.name}.{linears[index]}")

    def _adapter(self, op: Gemm, name: str) -> Iterator[Op]:
        """Tensor parallelism divides B as it divides a linear's outputs, and A as it divides its inputs, so that what is added has the
        linear's own layout; between the two the ranks sum `rank` elements a token, of the gradient or of the product."""
        rank, tokens = self._lora.rank, op.tokens
        role: Role = "mlp_adapter" if op.role in FEED_FORWARD else ""
        columns, rows = op.split == "column", op.split == "row"
        self.weights += [
            Weight(name=f"{name}.lora_A.weight", shape=(rank, op.k), split=1 if rows else None),
            Weight(name=f"{name}.lora_B.weight", shape=(op.n, rank), split=0 if columns else None),
        ]
        if self._lora.dropout:
            taken = op.tokens * op.k
            mask = Saved(name=f"{name}.dropout.mask", elements=taken, itemsize=MASK_BYTES, group="dropout")
            yield Pointwise(name=f"{name}.dropout", role=role, elements=taken, moved=READ + WRITE + MASK_BYTES, saves=(mask,))
            inputs: tuple[Saved, ...] = (Saved(name=f"{name}.lora_A.input", elements=taken, group="dropout"),)
        else:
            inputs = self._inputs.pop(op.name, ())
        yield Gemm(name=f"{name}.lora_A", role=role, tokens=tokens, k=op.k, n=rank, split="row" if rows else None, saves=inputs)
        if rows:
            yield Exit(elements=tokens * rank)
        if columns:
            yield Enter(elements=tokens * rank)
        middle = Saved(name=f"{name}.lora_B.input", elements=tokens * rank)
        yield Gemm(name=f"{name}.lora_B", role=role, tokens=tokens, k=rank, n=op.n, split="column" if columns else None, saves=(middle,))
        yield Pointwise(name=f"{name}.lora_scale", role=role, elements=0, moved=0.0)  # a kernel of its own
        yield Pointwise(name=f"{name}.lora_add", role=role, elements=tokens * op.n, moved=ADDED, shard="tp" if columns else "sequence")
