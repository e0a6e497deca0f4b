"""The model that a row of a table describes, with the facts that tables leave out, and the seconds that its figures mean."""

from __future__ import annotations

import re
from math import ceil
from typing import Final, NamedTuple

from orchestrator.model.architecture import Run as LayerRun
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.spec import Architecture
from orchestrator.validate.rows import SkipError, number, whole

MEGATRON_VOCAB = 51200
"""GPT-2's 50257 padded to 128 x 8 and more, as the Megatron papers state."""
GPT2_VOCAB = 50257
MEGATRON_DROPOUT = 0.1
"""Megatron's default for hidden states and attention (arguments.py), which the functional goldens and BigScience's scripts leave as it
is: V100 peaks without recompute need dropout's masks and outputs (34 s b h + 5 a s^2 b a layer)."""
NEMOTRON_VOCAB = 256000
T5_DECODER_LENGTH = 128
"""Megatron's functional T5 tests: --decoder-seq-length 128."""
T5_VOCAB = 29056
"""BertWordPieceCase, padded, with extra ids."""
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


class Mixture(NamedTuple):
    """What the tables leave out of a model of experts: widths of an expert and of the shared ones, layers without experts, a head's width,
    whether its attention is DeepSeek-V3's."""

    expert: int
    shared: int = 0
    dense_layers: int = 0
    kv_channels: int | None = None
    latent: bool = False


LATENT: Final = LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
MIXTURES: Final = {
    "qwen3_30b_a3b": Mixture(768, kv_channels=128),
    "qwen3_moe_30b": Mixture(768, kv_channels=128),
    "qwen3_235b_a22b": Mixture(1536, kv_channels=128),
    "qwen3_moe_235b": Mixture(1536, kv_channels=128),
    "deepseek_v3": Mixture(2048, shared=2048, dense_layers=3, latent=True),
    "kimi_k2": Mixture(2048, shared=2048, dense_layers=1, latent=True),
    "gpt_oss_20b": Mixture(2880, kv_channels=64),
    "gpt_oss_120b": Mixture(2880, kv_channels=64),
    "mixtral_8x7b": Mixture(14336),
    "mixtral_8x22b": Mixture(16384),
    "grok1": Mixture(32768),
}
"""What the tables leave out of published models, by the name's beginning: their config.json (Hugging Face; xai-org/grok-1's run.py). The
windows of GPT-OSS's attention are not described."""


def plain_name(name: str) -> str:
    """Lower case, one underscore where words part.

    >>> plain_name("Qwen3 30B-A3B"), plain_name("DeepSeekV3 (w/ MTP)"), plain_name("DeepSeek V3 671B"), plain_name("Grok-1 314B")
    ('qwen3_30b_a3b', 'deepseek_v3_(w/_mtp)', 'deepseek_v3_671b', 'grok1_314b')
    """
    words = re.sub(r"[ _-]+", "_", name.lower())
    return words.replace("deepseekv3", "deepseek_v3").replace("grok_1", "grok1")


def mixture_of(row: dict[str, str]) -> Architecture:
    """A mixture of experts that is known by name."""
    name = row.get("model_name", "")
    facts = next((facts for words, facts in MIXTURES.items() if plain_name(name).startswith(words)), None)
    if facts is None:
        raise SkipError(f"the experts of {name or 'this model'} are not described")
    heads, layers = whole(row, "num_attention_heads"), whole(row, "num_layers")
    experts = Experts(
        num_experts=whole(row, "num_experts"),
        topk=whole(row, "moe_router_topk"),
        ffn_hidden_size=facts.expert,
        shared_ffn_hidden_size=facts.shared,
    )
    dense = (LayerRun(layers=facts.dense_layers),) if facts.dense_layers else ()
    return Architecture(
        family="llama",
        name=name,
        num_layers=layers,
        hidden_size=whole(row, "hidden_size"),
        num_attention_heads=heads,
        num_query_groups=None if "MLA" in row.get("num_query_groups", "") else whole(row, "num_query_groups", heads),
        kv_channels=facts.kv_channels,
        ffn_hidden_size=whole(row, "ffn_hidden_size"),
        vocab_size=whole(row, "vocab_size"),
        max_position_embeddings=whole(row, "seq_length"),
        activation="swiglu",
        normalization="RMSNorm",
        position_embedding="rope",
        add_bias_linear=False,
        tie_embeddings=False,
        mixer=LATENT if facts.latent else None,
        pattern=(*dense, LayerRun(layers=layers - facts.dense_layers, feed_forward=experts)),
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
