"""config.json of published models, by hand: what decides their shape; and their parameters as printed by their checkpoints (safetensors
metadata on Hugging Face) where that is known, without heads of multi-token prediction and routers' correction biases."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def rows(kind: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": 32768,
        **more,
    }


def latent(q: int | None, **more: Any) -> dict[str, Any]:
    return {"q_lora_rank": q, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, **more}


def experts(number: int, topk: int, width: int, shared: int, dense: int, **more: Any) -> dict[str, Any]:
    return {
        "n_routed_experts": number,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": width,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        **more,
    }


def states(layers: int, hidden: int, heads: int, groups: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Of Mamba-2."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_heads": heads, "n_groups": groups, "vocab_size": vocab}
    return {"model_type": "mamba2", "head_dim": 64, "state_size": 128, **sizes, **more}


def delta_nets(kind: str, layers: int, hidden: int, heads: int, groups: int, vocab: int, states: int, **more: Any) -> dict[str, Any]:
    """Of Qwen3-Next and Qwen3.5's text; `states`: heads of values."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups}
    return {"model_type": kind, "vocab_size": vocab, "linear_num_value_heads": states, "head_dim": 256, **sizes, **LONG, **more}


def shared(number: int, topk: int, width: int) -> dict[str, Any]:
    """Experts with one that all tokens visit, as wide as the others."""
    widths = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), width)
    return {"num_experts": number, "num_experts_per_tok": topk, **widths}


LONG = {"max_position_embeddings": 262144}
QWEN35_WHOLE = {
    "Qwen3.5-9B": (9_653_104_368, 456_010_480),
    "Qwen3.5-27B": (27_781_427_952, 460_730_096),
    "Qwen3.5-35B-A3B": (35_951_822_704, 446_571_248),
    "Qwen3.5-122B-A10B": (125_086_497_008, 451_290_864),
    "Qwen3.5-397B-A17B": (403_397_928_944, 456_010_480),
    "Qwen3-Next-80B-A3B": (81_324_862_720, 0),
}
"""Parameters of the checkpoints with their layer of multi-token prediction (the Hub's `safetensors.total` of each repository), and those of
what looks at images, as transformers builds it (Qwen3_5MoeForConditionalGeneration with `out_hidden_size` of the text's)."""
LLAMA4_VISION = 871_932_416
"""Parameters of what looks at images in the checkpoints of Llama 4 (34 layers of 1,408) and of what joins it to the text model."""
NEMOTRON_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NANO_30B = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

PUBLISHED: dict[str, tuple[dict[str, Any], int | None]] = {
    "Llama-3.1-8B": (rows("llama", 32, 4096, 32, 8, 14336, 128256, rope_scaling=LLAMA3, rope_theta=500000.0), 8_030_261_248),
    "Llama-3.1-70B": (rows("llama", 80, 8192, 64, 8, 28672, 128256, rope_scaling=LLAMA3), 70_553_706_496),
    "Llama-3.1-405B": (rows("llama", 126, 16384, 128, 8, 53248, 128256, rope_scaling=LLAMA3), 405_853_388_800),
    "Qwen2.5-0.5B": (rows("qwen2", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True), 494_032_768),
    "Qwen2.5-7B": (rows("qwen2", 28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen2.5-72B": (rows("qwen2", 80, 8192, 64, 8, 29568, 152064), 72_706_203_648),
    "Qwen3-0.6B": (rows("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True), 596_049_920),
    "Qwen3-8B": (rows("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "Qwen3-32B": (rows("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128), 32_762_123_264),
    "Mistral-7B-v0.1": (rows("mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096), 7_241_732_096),
    "Mistral-7B-v0.3": (rows("mistral", 32, 4096, 32, 8, 14336, 32768, sliding_window=None), 7_248_023_552),
    "Phi-3-mini-4k": (rows("phi3", 32, 3072, 32, 32, 8192, 32064, sliding_window=2047, pad_token_id=0), 3_821_079_552),
    "Phi-3-medium-4k": (rows("phi3", 40, 5120, 40, 10, 17920, 32064, sliding_window=2047, pad_token_id=0), 13_960_238_080),
    "OLMo-2-7B": (rows("olmo2", 32, 4096, 32, 32, 11008, 100352), 7_298_617_344),
    "Gemma-2-2b": (rows("gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256, tie_word_embeddings=True), 2_614_341_888),
    "Gemma-2-9b": (rows("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256, tie_word_embeddings=True), 9_241_705_984),
    "Gemma-3-1b": (
        rows("gemma3_text", 26, 1152, 4, 1, 6912, 262144, head_dim=256, sliding_window=512, tie_word_embeddings=True),
        999_885_952,
    ),
    "Mixtral-8x7B": (rows("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2), 46_702_792_704),
    "Mixtral-8x22B": (rows("mixtral", 56, 6144, 48, 8, 16384, 32768, num_local_experts=8, num_experts_per_tok=2), 140_630_071_296),
    "Qwen3-30B-A3B": (
        rows(
            *("qwen3_moe", 48, 2048, 32, 4, 6144, 151936),
            **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        ),
        30_532_122_624,
    ),
    "Qwen3-235B-A22B": (
        rows(
            *("qwen3_moe", 94, 4096, 64, 4, 12288, 151936),
            **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True},
        ),
        235_093_634_560,
    ),
    "DeepSeek-V2-Lite": (
        rows("deepseek_v2", 27, 2048, 16, 16, 10944, 102400, **latent(None), **experts(64, 6, 1408, 2, 1)),
        15_706_484_224,
    ),
    "DeepSeek-V2": (
        rows("deepseek_v2", 60, 5120, 128, 128, 12288, 102400, **latent(1536), **experts(160, 6, 1536, 2, 1, n_group=8, topk_group=3)),
        235_741_434_880,
    ),
    "DeepSeek-V3": (
        rows("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, **latent(1536), **experts(256, 8, 2048, 1, 3, n_group=8, topk_group=4)),
        671_026_404_352,
    ),
    "Kimi-K2": (
        rows("deepseek_v3", 61, 7168, 64, 64, 18432, 163840, **latent(1536), **experts(384, 8, 2048, 1, 1, n_group=1, topk_group=1)),
        None,
    ),
    "gpt-oss-20b": (
        rows(
            *("gpt_oss", 24, 2880, 64, 8, 2880, 201088),
            **{"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rope_scaling": YARN},
        ),
        20_914_757_184,
    ),
    "gpt-oss-120b": (
        rows(
            *("gpt_oss", 36, 2880, 64, 8, 2880, 201088),
            **{"head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "rope_scaling": YARN},
        ),
        116_829_156_672,
    ),
    "Llama-4-Scout": (
        rows(
            *("llama4_text", 48, 5120, 40, 8, 8192, 202048),
            **{"intermediate_size_mlp": 16384, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1},
        ),
        108_641_793_536 - LLAMA4_VISION,
    ),
    "Llama-4-Maverick": (
        rows(
            *("llama4_text", 48, 5120, 40, 8, 8192, 202048),
            **{"intermediate_size_mlp": 16384, "head_dim": 128, "num_local_experts": 128, "num_experts_per_tok": 1},
            **{"interleave_moe_layer_step": 2, "use_qk_norm": False},
        ),
        401_583_781_376 - LLAMA4_VISION,
    ),
    "mamba2-130m": (states(24, 768, 24, 1, 50288, tie_word_embeddings=True), 128_989_632),
    "Codestral-Mamba": (states(64, 4096, 128, 8, 32768), 7_285_403_648),
    "Nemotron-H-8B": (rows("nemotron_h", 52, 4096, 32, 8, 21504, 131072, hybrid_override_pattern=NEMOTRON_8B), None),
    "Nemotron-Nano-9B-v2": (
        rows("nemotron_h", 56, 4480, 40, 8, 15680, 131072, hybrid_override_pattern=NANO_9B, mamba_head_dim=80),
        8_888_227_328,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        rows(
            *("nemotron_h", 52, 2688, 32, 2, 1856, 131072),
            **{"hybrid_override_pattern": NANO_30B, "mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6},
            **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5},
        ),
        31_577_937_344,
    ),
    "Qwen3-Next-80B-A3B": (
        delta_nets("qwen3_next", 48, 2048, 16, 2, 151936, 32, intermediate_size=5120, **shared(512, 10, 512)),
        79_674_391_296,
    ),
    "Qwen3.5-9B": (delta_nets("qwen3_5_text", 32, 4096, 16, 4, 248320, 32, intermediate_size=12288), 8_953_803_264),
    "Qwen3.5-27B": (delta_nets("qwen3_5_text", 64, 5120, 24, 4, 248320, 48, intermediate_size=17408), 26_895_998_464),
    "Qwen3.5-35B-A3B": (delta_nets("qwen3_5_moe_text", 40, 2048, 16, 2, 248320, 32, **shared(256, 8, 512)), 34_660_610_688),
    "Qwen3.5-122B-A10B": (delta_nets("qwen3_5_moe_text", 48, 3072, 32, 2, 248320, 64, **shared(256, 8, 1024)), 122_111_526_912),
    "Qwen3.5-397B-A17B": (delta_nets("qwen3_5_moe_text", 60, 4096, 32, 2, 248320, 64, **shared(512, 10, 1024)), 396_346_350_336),
    "GLM-4.5-Air": (
        rows(
            *("glm4_moe", 46, 4096, 96, 8, 10944, 151552),
            **experts(128, 8, 1408, 1, 1, head_dim=128, attention_bias=True, partial_rotary_factor=0.5, use_qk_norm=False),
        ),
        None,
    ),
    "GLM-4.5": (
        rows(
            *("glm4_moe", 92, 5120, 96, 8, 12288, 151552),
            **experts(160, 8, 1536, 1, 3, head_dim=128, attention_bias=True, partial_rotary_factor=0.5, use_qk_norm=True),
        ),
        None,
    ),
}
