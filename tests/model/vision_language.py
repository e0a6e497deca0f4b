"""config.json of models that look at images: small ones of each kind, and published ones by hand, what decides their shape, with
their parameters as the Hub prints them of their checkpoints (`safetensors.total`). Those of LLaVA 1.5, Gemma 3, Qwen2-VL, Qwen2.5-VL (3B
and 7B) and Qwen3-VL were looked up in other public records; those of LLaVA 1.6, OneVision, InternVL3 and Qwen2.5-VL 72B stand here from
memory alone."""

from __future__ import annotations

from typing import Any

from published_counts import delta_nets, rows, shared

CLIP_TINY = {
    **{"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"image_size": 28, "patch_size": 7, "hidden_act": "quick_gelu"},
}
SIGLIP_TINY = CLIP_TINY | {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False}
QWEN_TINY = {
    **{"depth": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 4, "out_hidden_size": 64},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2},
}
INTERN_TINY = CLIP_TINY | {"model_type": "internvl_vision", "hidden_act": "gelu", "attention_bias": True}


def lm(kind: str, groups: int = 2, **more: Any) -> dict[str, Any]:
    found = rows(kind, 2, 64, 4, groups, 96, 256, **more)
    return found | {"max_position_embeddings": 1024}


MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LLAMA, QWEN2, QWEN3 = lm("llama"), lm("qwen2"), lm("qwen3", head_dim=16)
GEMMA = lm("gemma3_text", head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
DELTA = delta_nets("qwen3_5_text", 4, 64, 4, 2, 256, 4, intermediate_size=96) | {
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16, "max_position_embeddings": 1024},
}
DELTA_EXPERTS = DELTA | {"model_type": "qwen3_5_moe_text", **shared(4, 2, 32)}
TINY: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llava", "image_token_index": 255, "text_config": LLAMA, "vision_config": CLIP_TINY},
    "llava of mistral, tied": {
        **{"model_type": "llava", "image_token_index": 255, "tie_word_embeddings": True, "multimodal_projector_bias": False},
        **{"text_config": lm("mistral", sliding_window=None), "vision_config": CLIP_TINY},
    },
    "llava_next": {"model_type": "llava_next", "image_token_index": 255, "text_config": LLAMA, "vision_config": CLIP_TINY},
    "llava_onevision": {"model_type": "llava_onevision", "image_token_index": 255, "text_config": QWEN2, "vision_config": SIGLIP_TINY},
    "gemma3": {
        **{"model_type": "gemma3", "image_token_index": 255, "mm_tokens_per_image": 4, "boi_token_index": 253, "eoi_token_index": 254},
        **{"text_config": GEMMA, "vision_config": SIGLIP_TINY},
    },
    "gemma3 with a pooling head": {
        **{"model_type": "gemma3", "image_token_index": 255, "mm_tokens_per_image": 4, "tie_word_embeddings": False},
        **{"text_config": GEMMA, "vision_config": SIGLIP_TINY | {"vision_use_head": True}},
    },
    "internvl": {"model_type": "internvl", "image_token_id": 255, "text_config": QWEN2, "vision_config": INTERN_TINY},
    "internvl of 6B's kind": {
        **{"model_type": "internvl", "image_token_id": 255, "tie_word_embeddings": False, "text_config": QWEN3},
        "vision_config": INTERN_TINY | {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
    },
    "qwen2_vl": {
        **{"model_type": "qwen2_vl", "image_token_id": 255, "text_config": lm("qwen2_vl_text", **MROPE)},
        "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 3, "patch_size": 4},
    },
    "qwen2_5_vl": {
        **{"model_type": "qwen2_5_vl", "image_token_id": 255, "text_config": lm("qwen2_5_vl_text", **MROPE)},
        "vision_config": QWEN_TINY | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
    },
    "qwen2_5_vl, flat and tied": {
        **lm("qwen2_5_vl", **{"tie_word_embeddings": True, "image_token_id": 255, "rope_theta": 1e6}),
        **{"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        "vision_config": QWEN_TINY | {"window_size": 16, "fullatt_block_indexes": [1, 3]},
    },
    "qwen3_vl": {
        **{"model_type": "qwen3_vl", "image_token_id": 255, "text_config": lm("qwen3_vl_text", head_dim=16, **MROPE)},
        "vision_config": QWEN_TINY | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
    },
    "qwen3_vl_moe": {
        **{"model_type": "qwen3_vl_moe", "image_token_id": 255, "text_config": lm("qwen3_vl_moe_text", head_dim=16, **EXPERTS, **MROPE)},
        "vision_config": QWEN_TINY | {"num_position_embeddings": 64, "deepstack_visual_indexes": [1]},
    },
    "qwen3_5": {
        **{"model_type": "qwen3_5", "image_token_id": 255, "text_config": DELTA},
        "vision_config": QWEN_TINY | {"num_position_embeddings": 64},
    },
    "qwen3_5_moe": {
        **{"model_type": "qwen3_5_moe", "image_token_id": 255, "text_config": DELTA_EXPERTS},
        "vision_config": QWEN_TINY | {"num_position_embeddings": 64},
    },
}

CLIP_336 = {
    **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "image_size": 336, "patch_size": 14},
}
SIGLIP_384 = {
    **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26},
    **{"num_attention_heads": 16, "image_size": 384, "patch_size": 14, "vision_use_head": False},
}
GEMMA_896 = SIGLIP_384 | {"num_hidden_layers": 27, "image_size": 896}
QWEN25_TOWER = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "window_size": 112}
QWEN3_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16}
INTERN_300M = {
    **{"model_type": "internvl_vision", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "attention_bias": True},
    **{"num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14], "use_qk_norm": False, "norm_type": "layer_norm"},
}


def gemma3(layers: int, hidden: int, heads: int, groups: int, ffn: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups}
    text = sizes | {"model_type": "gemma3_text", "intermediate_size": ffn, "sliding_window": 1024}
    if heads == 32:
        text |= {"head_dim": 128}
    return {"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": text, "vision_config": GEMMA_896}


def qwen(kind: str, tower: dict[str, Any], text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "text_config": text, "vision_config": tower | {"out_hidden_size": text["hidden_size"]}, **more}


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "llava-1.5-7b": (
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
         "vision_config": CLIP_336}, 7_063_427_072,
    ),
    "llava-v1.6-mistral-7b": (
        {"model_type": "llava_next", "text_config": {"model_type": "mistral", "vocab_size": 32064, "sliding_window": None},
         "vision_config": CLIP_336}, 7_566_747_648,
    ),
    "llava-onevision-qwen2-7b-ov": (
        {"model_type": "llava_onevision", "text_config": rows("qwen2", 28, 3584, 28, 4, 18944, 152064), "vision_config": SIGLIP_384},
        8_030_348_832,
    ),
    "gemma-3-4b": (gemma3(34, 2560, 8, 4, 10240), 4_300_079_472),
    "gemma-3-12b": (gemma3(48, 3840, 16, 8, 15360), 12_187_325_040),
    "gemma-3-27b": (gemma3(62, 5376, 32, 16, 21504), 27_432_406_640),
    "InternVL3-8B": (
        {"model_type": "internvl", "tie_word_embeddings": False, "text_config": rows("qwen2", 28, 3584, 28, 4, 18944, 151674),
         "vision_config": INTERN_300M}, 7_944_373_760,
    ),
    "Qwen2-VL-7B": (
        {"model_type": "qwen2_vl", "text_config": rows("qwen2_vl_text", 28, 3584, 28, 4, 18944, 152064),
         "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584}}, 8_291_375_616,
    ),
    "Qwen2.5-VL-3B": (
        qwen("qwen2_5_vl", QWEN25_TOWER, rows("qwen2_5_vl_text", 36, 2048, 16, 2, 11008, 151936), tie_word_embeddings=True), 3_754_622_976,
    ),
    "Qwen2.5-VL-7B": (qwen("qwen2_5_vl", QWEN25_TOWER, rows("qwen2_5_vl_text", 28, 3584, 28, 4, 18944, 152064)), 8_292_166_656),
    "Qwen2.5-VL-72B": (
        qwen("qwen2_5_vl", QWEN25_TOWER | {"intermediate_size": 3456}, rows("qwen2_5_vl_text", 80, 8192, 64, 8, 29568, 152064)),
        73_410_777_344,
    ),
    "Qwen3-VL-4B": (
        qwen("qwen3_vl", {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
                          "deepstack_visual_indexes": [5, 11, 17]},
             rows("qwen3_vl_text", 36, 2560, 32, 8, 9728, 151936, head_dim=128), tie_word_embeddings=True), 4_437_815_808,
    ),
    "Qwen3-VL-8B": (
        qwen("qwen3_vl", QWEN3_TOWER | {"deepstack_visual_indexes": [8, 16, 24]},
             rows("qwen3_vl_text", 36, 4096, 32, 8, 12288, 151936, head_dim=128)), 8_767_123_696,
    ),
    "Qwen3-VL-30B-A3B": (
        qwen("qwen3_vl_moe", QWEN3_TOWER | {"deepstack_visual_indexes": [8, 16, 24]},
             rows("qwen3_vl_moe_text", 48, 2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                  moe_intermediate_size=768, norm_topk_prob=True)), 31_070_754_032,
    ),
}  # fmt: skip
