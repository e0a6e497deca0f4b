"""The model that a row of a table describes, with the facts that tables leave out, and the seconds that its figures mean."""

from __future__ import annotations

import re
from math import ceil

from orchestrator.model.architecture import Architecture
from orchestrator.model.parts.attention import GroupedQueryAttention
from tests.validation.mixtures import mixture_of
from tests.validation.rows import number, whole

MEGATRON_VOCAB = 51200
"""Ids of the vocabulary in the Megatron papers: GPT-2's 50257 padded to 128 x 8 and more, as they state."""
GPT2_VOCAB = 50257
MEGATRON_DROPOUT = 0.1
"""Megatron's default for hidden states and attention (arguments.py), which the functional goldens and BigScience's scripts leave as it
is: V100 peaks without recompute need dropout's masks and outputs (34 s b h + 5 a s^2 b a layer)."""
NEMOTRON_VOCAB = 256000
T5_DECODER_LENGTH = 128
"""Tokens of the decoder in Megatron's functional T5 tests: --decoder-seq-length 128."""
T5_VOCAB = 29056
"""Size of the vocabulary BertWordPieceCase, padded, with extra ids."""
QWEN3 = re.compile(r"qwen3-[\d.]+b$")
"""Dense models of this series, which norm the queries and keys of each head."""
INTERNEVO_MULTIPLE = 256
"""InternEvo's MLP rounds its width up to a multiple of this (multiple_of): 8/3 of 4096 are 10922, as its table has it, and InternLM-7B's
11008 (its config.json)."""


def architecture_of(table: str, row: dict[str, str]) -> Architecture:
    """The model that a row describes, with its family's facts."""
    name = row.get("model_name", "")
    lowered = name.lower()
    notes = row.get("notes", "")
    if row.get("num_experts"):
        return mixture_of(row)
    hidden = whole(row, "hidden_size")
    if lowered.startswith(("t5/", "t5")):
        family = "t5"
    elif lowered.startswith(("bert/", "bert")):
        family = "bert"
    elif "swiglu=True" in notes or any(word in lowered for word in ("llama", "qwen", "internlm")):
        family = "llama"
    else:
        family = "gpt"
    heads = whole(row, "num_attention_heads", heads_default(hidden) if "bigscience" in table else None)
    layers = whole(row, "num_layers", 12 if family == "t5" else None)
    golden = table == "megatron_lm_functional_goldens"
    nemotron = "nemotron4" in lowered or "15b_8t" in lowered
    golden_vocab = T5_VOCAB if family in ("t5", "bert") else NEMOTRON_VOCAB if nemotron else GPT2_VOCAB
    vocab = whole(row, "vocab_size", golden_vocab if golden else MEGATRON_VOCAB)
    tied = not ("untie-embeddings" in notes or nemotron)
    if family == "llama":
        tied = "nanotron" in row.get("engine", "") and whole(row, "ffn_hidden_size") < 10000
        tied |= re.search(r"(^|; )tied embeddings(;|$)", notes) is not None
    rope = "position-embedding-type=rope" in notes or nemotron or family == "llama"
    megatrons = any(name in row.get("engine", "").lower() for name in ("megatron-lm", "megatron-deepspeed"))
    dropout = MEGATRON_DROPOUT if (golden and hidden <= 1024) or megatrons else 0.0
    mpt = "mosaic" in table
    kv = re.search(r"kv-channels=(\d+)", notes)
    groups = whole(row, "num_query_groups", heads)
    ffn = whole(row, "ffn_hidden_size", 4 * hidden)
    if "internevo" in row.get("engine", "").lower():
        ffn = ceil(ffn / INTERNEVO_MULTIPLE) * INTERNEVO_MULTIPLE
    display = "GPT-3 175B" if layers == 96 and hidden == 12288 and family == "gpt" else name
    return Architecture(
        family=family,
        name=display or "unnamed",
        mixer=GroupedQueryAttention(qk_norm="head") if QWEN3.search(lowered) else None,
        num_layers=layers,
        decoder_num_layers=layers if family == "t5" else 0,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=int(kv.group(1)) if kv else None,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=whole(row, "seq_length"),
        activation="swiglu" if family == "llama" else "gelu",  # squared ReLU keeps two tensors as GELU does
        normalization="RMSNorm" if family == "llama" else "LayerNorm",
        position_embedding="relative" if family == "t5" and "relative" in notes else "rope" if rope else "learned_absolute",
        add_bias_linear=family not in ("llama",) and not nemotron and not mpt,
        tie_embeddings=tied,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        num_token_types=2 if family == "bert" else 0,
    )


def heads_default(hidden: int) -> int:
    """Heads where a BLOOM candidate's table prints none: 96 where it divides (the section's other rows), else 64."""
    return 96 if hidden % 96 == 0 else 64


def measured_time(row: dict[str, str], architecture: Architecture, gbs: int, seq: int, num_gpus: int) -> float | None:
    """Seconds a step: as printed, or from tokens/s, or from TFLOP/s through the formula that the source prints."""
    step = number(row, "step_time_s")
    if step is not None:
        return step
    tokens = number(row, "tokens_per_s_per_gpu")
    if tokens is not None:
        return gbs * seq / (tokens * num_gpus)
    tflops = number(row, "tflops_per_gpu")
    if tflops is None:
        return None
    flops = printed_flops(row.get("flop_formula", ""), architecture, gbs, seq)
    return None if flops is None else flops / (tflops * 1e12 * num_gpus)


def printed_flops(formula: str, architecture: Architecture, gbs: int, seq: int) -> float | None:
    """FLOPs of a step as the source counts them; None: the formula is not known.

    Narayanan et al. 2021 (SC21): 96 B s L h^2 (1 + s/6h + V/16Lh), recompute included. BigScience's older scripts: 8 x parameters
    without embeddings x tokens.
    """
    layers, hidden = architecture.num_layers, architecture.hidden_size
    if "96BsLh^2(1+s/6h+V/16lh)" in formula or "Megatron formu" in formula:
        return 96.0 * gbs * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + architecture.vocab_size / (16 * layers * hidden))
    if "older approx" in formula:
        return 8.0 * 12 * layers * hidden**2 * gbs * seq
    return None
