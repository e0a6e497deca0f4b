"""Models of experts as tables name them: what a row says of its experts, and what the published model says where the row is silent."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from orchestrator.model.architecture import Architecture
from orchestrator.model.architecture import Run as LayerRun
from orchestrator.model.families import from_hf_config
from orchestrator.model.parts import Mixer
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.experts import Experts
from orchestrator.model.parts.gated_delta_net import GatedDeltaNet
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.vision import Images, Vision
from tests.validation.rows import SkipError, whole


class Mixture(NamedTuple):
    """Facts of a published model: widths of an expert and of the shared ones, layers without experts, a head's width, its latent attention,
    layers of multi-token prediction, the window of every other layer, whether queries and keys are normed, the gated delta net of three
    layers of four (the fourth then has gated attention)."""

    expert: int
    shared: int = 0
    dense_layers: int = 0
    kv_channels: int | None = None
    latent: LatentAttention | None = None
    mtp: int = 0
    window: int = 0
    qk_norm: bool = False
    limit: tuple[int | None, int | None] = (None, None)
    """Groups of experts, and how many of them a token may go to."""
    delta: GatedDeltaNet | None = None


DEEPSEEK_V2: Final = LatentAttention(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
"""Latent attention of DeepSeek-V2, V3 and Kimi K2."""
MOONLIGHT: Final = LatentAttention(kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
"""Moonlight's and DeepSeek-V2-Lite's: one matrix for the queries."""
QWEN35: Final = {
    "35b_a3b": Mixture(512, shared=512, kv_channels=256, mtp=1, delta=GatedDeltaNet(num_key_heads=16, num_value_heads=32)),
    "122b_a10b": Mixture(1024, shared=1024, kv_channels=256, mtp=1, delta=GatedDeltaNet(num_key_heads=16, num_value_heads=64)),
    "397b_a17b": Mixture(1024, shared=1024, kv_channels=256, mtp=1, delta=GatedDeltaNet(num_key_heads=16, num_value_heads=64)),
}
"""Qwen3.5's text models, and Qwen3.6's of the same shapes, by what follows their name. Their layer of multi-token prediction is trained
(Megatron-Bridge 067f987, models/conversion/model_bridge.py:498: `mtp_num_hidden_layers`, which their config.json has at 1)."""
WITH_VISION: Final = {"qwen35_vl_": "qwen3_5_moe", "qwen3_vl_": "qwen3_vl_moe"}
"""How names begin of models whose run trains what looks at images too (perf_recipes/qwen_vl/common.py, _qwen35_vl_common), and their
model_type."""
IMAGES: Final = Images(count=1, tokens=64)
"""Of a sample in their benchmarks: one of 256 x 256 pixels (data/builders/mock_vlm_sft.py), 16 to a patch, four patches to a token."""
TOWER: Final = Vision(
    model_type="qwen3_5_moe", num_layers=27, hidden_size=1152, num_attention_heads=16, ffn_hidden_size=4304, patch_size=16,
    hidden_act="gelu_pytorch_tanh", temporal_patch_size=2, patch_bias=True, num_position_embeddings=2304, rotary=True,
    spatial_merge_size=2, projector="merger",
)  # fmt: skip
"""What looks at images in Qwen3.5, 0.45 billion parameters, and in Qwen3-VL, which gives three of its layers' output to the decoder too."""
DEEPSTACK: Final = (8, 16, 24)


def tower_of(name: str) -> Vision | None:
    """What looks at images in the run of a model of this name; None: nothing does."""
    kind = next((kind for words, kind in WITH_VISION.items() if plain_name(name).startswith(words)), None)
    if kind is None:
        return None
    return replace(TOWER, model_type=kind, deepstack_visual_indexes=DEEPSTACK if kind == "qwen3_vl_moe" else ())


MIXTURES: Final = {
    **{f"qwen35_{name}": facts for name, facts in QWEN35.items()},
    **{f"qwen35_vl_{name}": facts for name, facts in QWEN35.items()},
    "qwen36_35b_a3b": QWEN35["35b_a3b"],
    "qwen3_next_80b_a3b": Mixture(512, shared=512, kv_channels=256, delta=GatedDeltaNet(num_key_heads=16, num_value_heads=32)),
    "qwen3_30b_a3b": Mixture(768, kv_channels=128, qk_norm=True),
    "qwen3_vl_30b_a3b": Mixture(768, kv_channels=128, qk_norm=True),
    "qwen3_moe_30b": Mixture(768, kv_channels=128, qk_norm=True),
    "qwen3_235b_a22b": Mixture(1536, kv_channels=128, qk_norm=True),
    "qwen3_vl_235b_a22b": Mixture(1536, kv_channels=128, qk_norm=True),
    "qwen3_moe_235b": Mixture(1536, kv_channels=128, qk_norm=True),
    "deepseek_v3": Mixture(2048, shared=2048, dense_layers=3, latent=DEEPSEEK_V2, mtp=1, limit=(8, 4)),
    "deepseek_v2_lite": Mixture(1408, shared=2816, dense_layers=1, latent=MOONLIGHT),
    "deepseek_v2": Mixture(1536, shared=3072, dense_layers=1, latent=DEEPSEEK_V2, limit=(8, 3)),
    "moonlight_16b_a3b": Mixture(1408, shared=2816, dense_layers=1, latent=MOONLIGHT),
    "kimi_k2": Mixture(2048, shared=2048, dense_layers=1, latent=DEEPSEEK_V2),
    "gpt_oss_20b": Mixture(2880, kv_channels=64, window=128),
    "gpt_oss_120b": Mixture(2880, kv_channels=64, window=128),
    "mixtral_8x7b": Mixture(14336),
    "mixtral_8x22b": Mixture(16384),
    "grok1": Mixture(32768),
}
"""Models with experts by the beginning of their name: their config.json (Hugging Face; xai-org/grok-1's run.py)."""
SIZES: Final = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size")
QWEN35_SIZES: Final = {
    "35b_a3b": (40, 2048, 16, 2, 512, 248320),
    "122b_a10b": (48, 3072, 32, 2, 1024, 248320),
    "397b_a17b": (60, 4096, 32, 2, 1024, 248320),
}
SHAPES: Final[dict[str, dict[str, int]]] = {
    name: dict(zip(SIZES, facts, strict=True))
    for name, facts in {
        "llama3_8b": (32, 4096, 32, 8, 14336, 128256),
        "llama3_70b": (80, 8192, 64, 8, 28672, 128256),
        "llama31_405b": (126, 16384, 128, 8, 53248, 128256),
        "qwen3_30b_a3b": (48, 2048, 32, 4, 6144, 151936),
        "qwen3_vl_30b_a3b": (48, 2048, 32, 4, 6144, 151936),
        "qwen3_235b_a22b": (94, 4096, 64, 4, 12288, 151936),
        "qwen3_vl_235b_a22b": (94, 4096, 64, 4, 12288, 151936),
        "gpt_oss_20b": (24, 2880, 64, 8, 2880, 201088),
        "gpt_oss_120b": (36, 2880, 64, 8, 2880, 201088),
        "deepseek_v3": (61, 7168, 128, 128, 18432, 129280),
        "kimi_k2": (61, 7168, 64, 64, 18432, 163840),
        **{f"qwen35_{name}": sizes for name, sizes in QWEN35_SIZES.items()},
        **{f"qwen35_vl_{name}": sizes for name, sizes in QWEN35_SIZES.items()},
        "qwen36_35b_a3b": QWEN35_SIZES["35b_a3b"],
        "qwen3_next_80b_a3b": (48, 2048, 16, 2, 5120, 151936),
        "mixtral_8x7b": (32, 4096, 32, 8, 14336, 32000),
        "mixtral_8x22b": (56, 6144, 48, 8, 16384, 32768),
    }.items()
}
"""The sizes of published models by name (their config.json), for rows that print a name alone: of the language model, where one sees."""
ROUTING: Final = {
    **dict.fromkeys(("qwen3_30b_a3b", "qwen3_vl_30b_a3b", "qwen3_235b_a22b", "qwen3_vl_235b_a22b"), (128, 8)),
    **{f"qwen35_{vision}{name}": (512, 10) if name == "397b_a17b" else (256, 8) for name in QWEN35 for vision in ("", "vl_")},
    "qwen36_35b_a3b": (256, 8),
    "qwen3_next_80b_a3b": (512, 10),
    **{"gpt_oss_20b": (32, 4), "gpt_oss_120b": (128, 4), "deepseek_v3": (256, 8), "kimi_k2": (384, 8)},
    **dict.fromkeys(("mixtral_8x7b", "mixtral_8x22b"), (8, 2)),
}
"""(experts, how many a token goes to) by model name: their config.json."""
GPT2_VOCAB: Final = "50257"
WITHOUT_PREDICTION: Final = "w/o_mtp"
"""How a name says that the model was trained without its layer of multi-token prediction. The others' printed TFLOP/s over their tokens/s
are 260 GFLOP a token, which is with it; of those that say so 250."""


def plain_name(name: str) -> str:
    """A model's name in lower case without the organisation, one underscore where words part.

    >>> plain_name("Qwen/Qwen3-30B-A3B"), plain_name("DeepSeekV3 (w/ MTP)"), plain_name("DeepSeek V3 671B"), plain_name("Grok-1 314B")
    ('qwen3_30b_a3b', 'deepseek_v3_(w/_mtp)', 'deepseek_v3_671b', 'grok1_314b')
    >>> plain_name("Qwen/Qwen3.5-35B-A3B")
    'qwen35_35b_a3b'
    """
    words = re.sub(r"[ _-]+", "_", re.sub(r"^[\w-]+/(?=\w)", "", name.lower()))
    return (
        re.sub(r"deepseek_?(?=v\d)", "deepseek_", words)
        .replace("grok_1", "grok1")
        .replace("qwen3.5", "qwen35")
        .replace("qwen3.6", "qwen36")
    )


def facts_of(name: str) -> Mixture | None:
    """The facts of the published model of this name; None: it is not known."""
    plain = plain_name(name)
    found = next((facts for words, facts in MIXTURES.items() if plain.startswith(words)), None)
    return found._replace(mtp=0) if found is not None and WITHOUT_PREDICTION in plain else found


def with_shape(row: dict[str, str]) -> dict[str, str]:
    """The row with the sizes of the published model of its name where it prints none.

    >>> row = with_shape({"model_name": "Qwen3-30B-A3B", "num_layers": "4"})
    >>> row["num_layers"], row["hidden_size"], row["num_experts"]
    ('4', '2048', '128')
    """
    plain = plain_name(row.get("model_name", ""))
    name = next((name for name in SHAPES if plain.startswith(name)), None)
    if name is None or (row.get("hidden_size") and not row.get("num_experts")):
        return row
    known = {key: str(value) for key, value in SHAPES[name].items()}
    if name in ROUTING:
        known["num_experts"], known["moe_router_topk"] = map(str, ROUTING[name])
    return {**row, **{key: row.get(key) or value for key, value in known.items()}}


GOLDEN_FLAGS: Final = {
    "moe_ffn_hidden_size": "moe-ffn-hidden-size",
    "etp": "expert-tensor-parallel-size",
    "dispatcher": "moe-token-dispatcher-type",
}
"""Columns that a functional test of Megatron-LM prints as its flags, in the notes."""


def golden(row: dict[str, str]) -> dict[str, str]:
    """A functional test's experts by its flags, and by Megatron's defaults where it has none (training/arguments.py, validate_args, and
    core/transformer/transformer_config.py): an expert is as wide as the feed-forward, 4 x hidden_size, and divided by tp; tokens are
    gathered.

    >>> row = golden({"hidden_size": "512", "num_experts": "8", "tp": "2", "notes": "moe-token-dispatcher-type=alltoall; expert-b=1"})
    >>> row["moe_ffn_hidden_size"], row["etp"], row["dispatcher"], row["vocab_size"]
    ('2048', '2', 'alltoall', '50257')
    """
    said = dict(word.strip().split("=", 1) for word in row.get("notes", "").split(";") if "=" in word)
    width = row.get("ffn_hidden_size") or str(4 * whole(row, "hidden_size"))
    defaults = {"moe_ffn_hidden_size": width, "etp": row.get("tp", ""), "dispatcher": "allgather"}
    known = {name: said.get(flag, defaults[name]) for name, flag in GOLDEN_FLAGS.items()}
    return {**row, "ffn_hidden_size": width, "vocab_size": row.get("vocab_size") or GPT2_VOCAB, **known}


def count(row: dict[str, str], key: str, default: int) -> int:
    """A whole number, 0 included; `default` for a blank. Raises SkipError for what is none."""
    text = row.get(key, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise SkipError(f"{key}={text} is no whole number")
    return int(text)


def latent_of(text: str) -> LatentAttention:
    """The latent attention of q_lora/kv_lora/qk_head/rope/v_head as the tables print them, a rank of 0 for one matrix. Raises SkipError.

    >>> latent_of("0/512/128/64/128").q_lora_rank is None, latent_of("1536/512/128/64/128").kv_lora_rank
    (True, 512)
    """
    try:
        query, keys, head, rotary, values = (int(word) for word in text.split("/"))
    except ValueError:
        raise SkipError(f"mla={text} is not q_lora/kv_lora/qk_head/rope/v_head") from None
    return LatentAttention(q_lora_rank=query or None, kv_lora_rank=keys, qk_head_dim=head, qk_rope_head_dim=rotary, v_head_dim=values)


HYBRIDS: Final[dict[str, dict[str, Any]]] = {
    "nemotron_3_nano_30b_a3b": {
        **{"model_type": "nemotron_h", "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
        **{"num_hidden_layers": 52, "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
        **{"vocab_size": 131072, "intermediate_size": 1856, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_routed_experts": 128},
        **{"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
        "routed_scaling_factor": 2.5,
    },
}
"""Models of state spaces, attention and experts by the beginning of their name: their config.json."""


def hybrid_of(name: str) -> dict[str, Any] | None:
    """The config.json of the hybrid of this name; None: it is not known."""
    return next((config for words, config in HYBRIDS.items() if plain_name(name).startswith(words)), None)


def mixture_of(row: dict[str, str]) -> Architecture:
    """The mixture of experts that a row describes; what it is silent about is the published model's of that name. Raises SkipError where
    neither says how wide an expert is."""
    name = row.get("model_name", "")
    config = hybrid_of(name)
    if config is not None:
        return from_hf_config({**config, "max_position_embeddings": whole(row, "seq_length")}, name)
    facts = facts_of(name)
    if facts is None:
        if not row.get("moe_ffn_hidden_size"):
            raise SkipError(f"the experts of {name or 'this model'} are not described")
        facts = Mixture(0)
    heads, layers, hidden = whole(row, "num_attention_heads"), whole(row, "num_layers"), whole(row, "hidden_size")
    latent = latent_of(row["mla"]) if row.get("mla") else facts.latent
    experts = Experts(
        num_experts=whole(row, "num_experts"),
        topk=whole(row, "moe_router_topk"),
        ffn_hidden_size=whole(row, "moe_ffn_hidden_size", facts.expert or None),
        shared_ffn_hidden_size=count(row, "shared_expert_ffn_hidden_size", facts.shared),
        shared_gate=facts.delta is not None,
        groups=facts.limit[0],
        group_topk=facts.limit[1],
    )
    dense_layers = count(row, "num_dense_layers", facts.dense_layers)
    window = count(row, "window_every_other", facts.window)
    mixer: Mixer | None = latent
    if latent is None and facts.qk_norm:
        mixer = GroupedQueryAttention(qk_norm="head")
    if facts.delta is not None:
        attention = GroupedQueryAttention(qk_norm="head", output_gate=True)
        pattern: tuple[LayerRun, ...] = (
            LayerRun(layers=3, mixer=facts.delta, feed_forward=experts),
            LayerRun(layers=1, mixer=attention, feed_forward=experts),
        )
    elif window:
        if dense_layers:
            raise SkipError("windows beside layers without experts are not described")
        narrow = GroupedQueryAttention(window=window)
        pattern = (LayerRun(layers=1, mixer=narrow, feed_forward=experts), LayerRun(layers=1, feed_forward=experts))
    else:
        dense = (LayerRun(layers=dense_layers),) if dense_layers else ()
        pattern = (*dense, LayerRun(layers=layers - dense_layers, feed_forward=experts))
    return Architecture(
        family="llama",
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=None if latent is not None else whole(row, "num_query_groups", heads),
        kv_channels=None if latent is not None else whole(row, "head_dim", facts.kv_channels or hidden // heads),
        ffn_hidden_size=whole(row, "ffn_hidden_size", whole(row, "moe_ffn_hidden_size", facts.expert or None)),
        vocab_size=whole(row, "vocab_size"),
        max_position_embeddings=whole(row, "seq_length"),
        activation="swiglu",
        normalization="RMSNorm",
        position_embedding="rope",
        rotary_percent=0.25 if facts.delta is not None else 1.0,
        zero_centered_norm=facts.delta is not None,
        add_bias_linear=False,
        tie_embeddings=False,
        mixer=mixer,
        pattern=pattern,
        mtp_num_layers=count(row, "mtp_layers", facts.mtp),
        vision=tower_of(name),
    )
