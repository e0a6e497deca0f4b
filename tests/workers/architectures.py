"""Forty architectures of transformers by name: small configurations in the shape of the published ones."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

WIDTHS = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
LM = WIDTHS | {"vocab_size": 512, "max_position_embeddings": 256}
GROUPED = LM | {"num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = WIDTHS | {"image_size": 64, "patch_size": 8} | NO_DROPOUT
SWIN = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 32,
    "depths": [2, 2, 4],
    "num_heads": [2, 4, 8],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
EXPERTS = GROUPED | {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SPEECH = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Case(NamedTuple):
    """A configuration's fields, and lengths in tokens (decoder: of an encoder-decoder)."""

    fields: dict[str, Any]
    seq_length: int = 64
    decoder_seq_length: int | None = None

    @property
    def config(self) -> str:
        return json.dumps(self.fields)


def of(
    model_type: str, fields: dict[str, Any], architecture: str | None = None, seq: int = 64, dec: int | None = None, **more: Any
) -> Case:
    named = {"architectures": [architecture]} if architecture else {}
    return Case({"model_type": model_type} | fields | more | named, seq, dec)


CASES: dict[str, Case] = {
    # language, decoders
    "llama": of("llama", GROUPED),
    "qwen2": of("qwen2", GROUPED),
    "qwen3": of("qwen3", GROUPED, head_dim=32),
    "mistral": of("mistral", GROUPED, sliding_window=None),
    "gemma2": of("gemma2", GROUPED, head_dim=32),
    "gemma3": of("gemma3_text", GROUPED, head_dim=32, sliding_window=32, num_hidden_layers=6),
    "phi3": of("phi3", GROUPED, pad_token_id=0),
    "olmo2": of("olmo2", GROUPED),
    "granite": of("granite", GROUPED),
    "gpt2": of("gpt2", {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256, "vocab_size": 512}),
    "gpt_neox": of("gpt_neox", LM),
    "stablelm": of("stablelm", GROUPED),
    "starcoder2": of("starcoder2", GROUPED, sliding_window=None),
    "cohere": of("cohere", GROUPED),
    "glm": of("glm", GROUPED, head_dim=32, pad_token_id=0),
    "opt": of("opt", LM, ffn_dim=256, word_embed_proj_dim=128),
    "smollm3": of("smollm3", GROUPED, pad_token_id=0),
    # experts
    "mixtral": of("mixtral", GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": of("qwen3_moe", EXPERTS, num_experts=8),
    "olmoe": of("olmoe", GROUPED, num_experts=4, num_experts_per_tok=2, pad_token_id=0),
    "gpt_oss": of("gpt_oss", GROUPED, head_dim=32, num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
    # state space and hybrids
    "mamba": of("mamba", {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 512}),
    "mamba2": of(
        "mamba2",
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "vocab_size": 512,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 1,
            "state_size": 16,
            "chunk_size": 32,
        },
    ),
    "qwen3_next": of(
        "qwen3_next",
        EXPERTS,
        **{"num_experts": 4, "shared_expert_intermediate_size": 64, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    # encoders
    "bert": of("bert", LM | NO_DROPOUT, "BertForMaskedLM"),
    "roberta": of("roberta", LM | NO_DROPOUT, "RobertaForMaskedLM"),
    "electra": of("electra", LM | NO_DROPOUT, "ElectraForMaskedLM", embedding_size=64),
    "distilbert": of(
        "distilbert",
        {"dim": 128, "n_layers": 4, "n_heads": 4, "hidden_dim": 256, "vocab_size": 512, "dropout": 0.0, "attention_dropout": 0.0},
        "DistilBertForMaskedLM",
    ),
    "deberta-v2": of(
        "deberta-v2", LM | NO_DROPOUT, "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=32
    ),
    "modernbert": of("modernbert", LM, "ModernBertForMaskedLM", pad_token_id=0, local_attention=32, global_attn_every_n_layers=2),
    # encoder-decoders
    "t5": of(
        "t5", {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 3, "num_heads": 4, "vocab_size": 512, "dropout_rate": 0.0}, dec=32
    ),
    "bart": of("bart", SPEECH | {"max_position_embeddings": 256, "dropout": 0.0}, "BartForConditionalGeneration", dec=32),
    "whisper": of(
        "whisper",
        SPEECH | {"num_mel_bins": 16, "max_source_positions": 100, "max_target_positions": 64},
        "WhisperForConditionalGeneration",
        dec=32,
    ),
    "wav2vec2": of(
        "wav2vec2",
        WIDTHS
        | {"vocab_size": 32, "pad_token_id": 0, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
        | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "activation_dropout": 0.0}
        | {"layerdrop": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean"},
        "Wav2Vec2ForCTC",
    ),
    # vision
    "vit": of("vit", VISION, "ViTForImageClassification", num_labels=10),
    "deit": of("deit", VISION, "DeiTForImageClassification", num_labels=10),
    "beit": of("beit", VISION, "BeitForImageClassification", num_labels=10),
    "dinov2": of("dinov2", VISION, "Dinov2ForImageClassification", num_labels=10, mlp_ratio=2),
    "swin": of("swin", SWIN, "SwinForImageClassification", num_labels=10),
    "swinv2": of("swinv2", SWIN, "Swinv2ForImageClassification", num_labels=10),
    "convnext": of(
        "convnext",
        {"hidden_sizes": [32, 64, 128], "depths": [2, 2, 4], "num_stages": 3, "image_size": 64},
        "ConvNextForImageClassification",
        num_labels=10,
    ),
    # vision and language
    "clip": of(
        "clip",
        {"text_config": LM | {"projection_dim": 64}, "vision_config": VISION | {"projection_dim": 64}, "projection_dim": 64},
        "CLIPModel",
    ),
    "siglip": of("siglip", {"text_config": LM | {"max_position_embeddings": 64}, "vision_config": VISION}, "SiglipModel"),
    "llava": of(
        "llava",
        {
            "text_config": GROUPED | {"model_type": "llama"},
            "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 64},
            "image_token_id": 500,
            "image_seq_length": 64,
        },
        "LlavaForConditionalGeneration",
        seq=96,
    ),
}


def own_module() -> Any:
    """A module of the user's own, as model.code= takes it: three blocks of two linears of 8 x 16, and a loss."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)) for _ in range(3)
            )

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy(x, y)

    return Model(), {"x": torch.zeros(1, 8), "y": torch.tensor([7], device="cpu")}
