"""Rows of fine-tuning: the adapters that a row names, or why it can't be priced."""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from orchestrator.model.lora import ALL, MEGATRON_LINEARS, Lora
from orchestrator.model.spec import Exchange, ModelSpec, Op
from orchestrator.units import GIB
from tests.validation.engines.engine import MeasuredEngine
from tests.validation.rows import SkipError, whole

TRANSFORMERS: Final[dict[str, tuple[str, ...]]] = {
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "c_proj": ("o_proj", "down_proj"),
    "w1": ("gate_proj",),
    "w2": ("up_proj",),
    **{word: (f"{word[0]}_proj",) for word in ("q", "k", "v", "o", "query", "key", "value")},
    **{word: (f"{word}_proj",) for word in ("gate", "up", "down")},
}
"""A target's printed name (Qwen's first modules, litgpt's, fsdp_qlora's) and the linears of transformers' Llama that it stands for."""
MEGATRON: Final = {"qkv": ("linear_qkv",), "proj": ("linear_proj",), **{name: (name,) for name in MEGATRON_LINEARS.values()}}
"""Linears of megatron-core by the names that MLPerf prints: "attention (qkv, proj)"."""
SWIFT: Final = "over mixed lengths"
"""Words in `peak_memory_kind` of what ms-swift prints as memory."""
GIGA: Final = 1e9
"""Bytes of the G that Qwen's README prints: its 81.0 on a card of 80 GiB is none of 2^30 bytes."""


def lora_of(row: dict[str, str], engine: MeasuredEngine) -> Lora | None:
    """The adapters of a row; None: all weights are trained. Raises SkipError with the reason why the row can't be priced."""
    task = row.get("task", "") or "pretrain"
    if task == "pretrain" or (task in ("sft", "full") and engine.tunes_full_lengths):
        return None
    if task != "lora":
        raise SkipError(f"task {task} is not pretraining")
    if engine.adapts is None:
        raise SkipError(f"LoRA under {engine.name} is not priced")
    if any(word in row.get("precision", "") for word in ("int4", "int8", "nf4", "base")):
        raise SkipError("the frozen weights are quantised: no row of lora.bits is among the figures")
    if "embedding" in row.get("lora_targets", ""):
        raise SkipError("embedding and output are trained whole, which lora.* has no key for")
    if row.get("offload", "none") not in ("", "none"):
        raise SkipError(f"offload of {row['offload']}")
    words = re.findall(r"[a-z_0-9]+", row.get("lora_targets", "").lower())
    if words == ["all", "linear"]:
        targets: tuple[str, ...] = (ALL,)
    else:
        known = TRANSFORMERS if engine.adapts == "transformers" else MEGATRON
        targets = tuple(dict.fromkeys(name for word in words for name in known.get(word, ())))
    if not targets:
        raise SkipError("the targets of LoRA are not stated")
    return Lora(rank=whole(row, "lora_dim"), targets=targets, dropout=engine.lora_dropout)


def exchanged_over(table: str, tp: int) -> int:
    """Ranks over which adapters' outputs are exchanged in place of gathered: NVIDIA's MLPerf runs have LORA_A2A=1 (config_common.sh)."""
    return tp if table.startswith("mlperf") else 1


def with_outputs_exchanged(model: ModelSpec, ranks: int) -> ModelSpec:
    """The model whose adapters' outputs go by an all-to-all over so many ranks (peft/utils.py, all2all_hp2sp), which sends as much as a
    gather of one rank's part."""

    def changed(op: Op) -> Op:
        return replace(op, elements=op.elements // ranks) if isinstance(op, Exchange) and op.of == "output" else op

    runs = (replace(run, layer=replace(run.layer, ops=tuple(map(changed, run.layer.ops)))) for run in model.runs)
    return model if ranks == 1 else replace(model, runs=tuple(runs))


def memory_unit(kind: str) -> float:
    """Bytes of one unit in the column of peaks."""
    return GIGA if kind.startswith(("G as printed", "the sum printed")) else GIB


def mixed_lengths(row: dict[str, str]) -> bool:
    """Whether the peak is what torch's allocator reserved over samples of many lengths.

    Tensors of a length that was not seen before find no free block that is large enough, and the blocks of shorter ones stay reserved:
    tests/benchmarks/mixed_lengths.py plays torch's allocator over such samples, and reserves 2 to 4 times what is in use at once, by their
    order. No plan of one length has that.
    """
    return SWIFT in row.get("peak_memory_kind", "")
