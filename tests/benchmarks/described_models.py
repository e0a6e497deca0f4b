"""Architectures by name from transformers, described from their configuration at published sizes: orchestrator/model/DESCRIBED.md.

    python tests/benchmarks/described_models.py [NAME ...] > orchestrator/model/DESCRIBED.md

One row a model, in 16 bits: parameters as its own code builds it; "equal" where its checkpoint is published with as many, else that number;
CPU seconds of the description (building, one forward and backward pass on the meta device, the partition and its comparison at small
width); its repeated blocks; what a tensor-parallel size must divide ("-": nothing is divided). What can't be described is a row with the
reason.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from orchestrator.commands import command, usage
from orchestrator.errors import InputError

SEQ = 1024
SHORT = {"bert": 512, "roberta": 512, "distilbert": 512, "clip": 77, "siglip": 64}
"""Tokens of those that know no more positions."""
VISION = {"image_size": 224, "patch_size": 16, "num_labels": 1000}
CLIP_TEXT = {"projection_dim": 512}


def lm(layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups}
    return sizes | {"intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": 4096} | more


UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
ROWS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "Llama-2-7B": ("llama", lm(32, 4096, 32, 32, 11008, 32000, **UNTIED), 6_738_415_616),
    "Llama-3-8B": ("llama", lm(32, 4096, 32, 8, 14336, 128256, **UNTIED), 8_030_261_248),
    "Mistral-7B": ("mistral", lm(32, 4096, 32, 8, 14336, 32000, **UNTIED), 7_241_732_096),
    "Qwen2-7B": ("qwen2", lm(28, 3584, 28, 4, 18944, 152064, **UNTIED), 7_615_616_512),
    "Qwen3-8B": ("qwen3", lm(36, 4096, 32, 8, 12288, 151936, head_dim=128, **UNTIED), 8_190_735_360),
    "gemma-2-2b": ("gemma2", lm(26, 2304, 8, 4, 9216, 256000, head_dim=256, **TIED), 2_614_341_888),
    "gemma-3-1b": ("gemma3_text", lm(26, 1152, 4, 1, 6912, 262144, head_dim=256, **TIED), 999_885_952),
    "Phi-3-mini": ("phi3", lm(32, 3072, 32, 32, 8192, 32064, pad_token_id=0, **UNTIED), 3_821_079_552),
    "OLMo-2-7B": ("olmo2", lm(32, 4096, 32, 32, 11008, 100352, **UNTIED), 7_298_617_344),
    "granite-3.1-8b": ("granite", lm(40, 4096, 32, 8, 12800, 49155, **TIED), 8_170_848_256),
    "SmolLM3-3B": ("smollm3", lm(36, 2048, 16, 4, 11008, 128256, pad_token_id=0, **TIED), 3_075_098_624),
    "stablelm-3b": ("stablelm", lm(32, 2560, 32, 32, 6912, 50304, **UNTIED), 2_795_443_200),
    "starcoder2-3b": ("starcoder2", lm(30, 3072, 24, 2, 12288, 49152, **TIED), 3_030_371_328),
    "glm-4-9b": ("glm", lm(40, 4096, 32, 2, 13696, 151552, head_dim=128, attention_bias=True, pad_token_id=0, **UNTIED), 9_399_951_360),
    "gpt2": ("gpt2", {}, 124_439_808),
    "gpt-neox-20b": ("gpt_neox", {}, 20_554_567_680),
    "opt-125m": ("opt", {}, 125_239_296),
    "falcon-7b": ("falcon", {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024}, 6_921_720_704),
    "Mixtral-8x7B": ("mixtral", lm(32, 4096, 32, 8, 14336, 32000, **UNTIED), 46_702_792_704),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        lm(48, 2048, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, **UNTIED),
        30_532_122_624,
    ),
    "OLMoE-1B-7B": (
        "olmoe",
        lm(16, 2048, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8, pad_token_id=1, **UNTIED),
        6_919_161_856,
    ),
    "gpt-oss-20b": ("gpt_oss", lm(24, 2880, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32, **UNTIED), 20_914_757_184),
    "mamba-130m": ("mamba", {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280}, 129_135_360),
    "bert-base-uncased": ("bert", {"architectures": ["BertForMaskedLM"]}, 109_514_298),
    "roberta-base": (
        "roberta",
        {"architectures": ["RobertaForMaskedLM"], "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
        124_697_433,
    ),
    "distilbert-base-uncased": ("distilbert", {"architectures": ["DistilBertForMaskedLM"]}, 66_985_530),
    "ModernBERT-base": ("modernbert", {"architectures": ["ModernBertForMaskedLM"]}, 149_655_232),
    "t5-small": ("t5", {}, 60_506_624),
    "bart-large": ("bart", {"architectures": ["BartForConditionalGeneration"]}, 406_291_456),
    "whisper-tiny": ("whisper", {"architectures": ["WhisperForConditionalGeneration"]}, 37_760_640),
    "vit-base-patch16-224": ("vit", {"architectures": ["ViTForImageClassification"], **VISION}, 86_567_656),
    "deit-base-patch16-224": ("deit", {"architectures": ["DeiTForImageClassification"], **VISION}, None),
    "dinov2-base": ("dinov2", {"architectures": ["Dinov2ForImageClassification"], "patch_size": 14, "image_size": 518}, None),
    "swin-tiny": ("swin", {"architectures": ["SwinForImageClassification"], "num_labels": 1000}, 28_288_354),
    "convnext-tiny-224": ("convnext", {"architectures": ["ConvNextForImageClassification"], "num_labels": 1000}, 28_589_128),
    "beit-base-patch16-224": ("beit", {"architectures": ["BeitForImageClassification"], "num_labels": 1000}, None),
    "clip-vit-base-patch32": ("clip", {"architectures": ["CLIPModel"]}, 151_277_313),
    "siglip-base-patch16-224": ("siglip", {"architectures": ["SiglipModel"]}, 203_155_970),
    "llava-1.5-7b": (
        "llava",
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "image_token_id": 32000,
            "image_seq_length": 576,
            "text_config": {"model_type": "llama"} | lm(32, 4096, 32, 32, 11008, 32064, **UNTIED),
            "vision_config": {
                "model_type": "clip_vision_model",
                **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
                **{"image_size": 336, "patch_size": 14, "projection_dim": 768},
            },
        },
        7_063_427_072,
    ),
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "text_config": {"model_type": "qwen2_5_vl_text"} | lm(28, 3584, 28, 4, 18944, 152064, **UNTIED),
            "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420},
            **UNTIED,
        },
        8_292_166_656,
    ),
    "wav2vec2-base-960h": (  # its own configuration leaves out layers at random and sums its loss: refused by key
        "wav2vec2",
        {"architectures": ["Wav2Vec2ForCTC"], "layerdrop": 0.0, "ctc_loss_reduction": "mean", "vocab_size": 32, "pad_token_id": 0},
        94_396_320,
    ),
    "detr-resnet-50": ("detr", {"architectures": ["DetrForObjectDetection"]}, None),
}
HEADER = """# Architectures described from their configuration

Written by `tests/benchmarks/described_models.py` (its first lines say what the columns are), in 16 bits at 1,024 tokens (BERT's kin
512, CLIP 77, SigLIP 64), with transformers {version}; CPU seconds of one run on a shared machine.

| model | kind | parameters | published | CPU s | blocks | tp divides |
|---|---|--:|---|--:|---|--:|"""


def row(name: str) -> str:
    from orchestrator.tracing.build import Source
    from orchestrator.tracing.trace import described

    kind, fields, published = ROWS[name]
    started = time.process_time()
    try:
        length = SHORT.get(kind, SEQ)
        found = described(Source(config=json.dumps({"model_type": kind} | fields)), length, 448 if kind == "whisper" else 256, 2)
    except InputError as error:
        return f"| {name} | {kind} | - | can't be described: {error.why} | {time.process_time() - started:.1f} | | |"
    parameters = sum(run.count * run.layer.parameters for run in found.runs)
    against = "" if published is None else "equal" if parameters == published else f"{published:,}"
    kinds: dict[str, int] = {}
    for run in found.runs:
        if run.layer.recomputable:
            kinds[run.layer.kind] = kinds.get(run.layer.kind, 0) + run.count
    blocks = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    tp = str(found.tp_divides) if found.divided and not found.no_autotp else "-"
    return f"| {name} | {kind} | {parameters:,} | {against} | {time.process_time() - started:.1f} | {blocks[:80]} | {tp} |"


def main(words: Sequence[str]) -> None:
    unknown = [name for name in words if name not in ROWS]
    if unknown:
        raise InputError("NAME", ", ".join(unknown), "is in no row", ROWS)
    import transformers

    print(HEADER.format(version=transformers.__version__))
    for name in words or ROWS:
        try:
            print(row(name), flush=True)
        except Exception as error:  # one model must not end the table
            print(f"| {name} | {ROWS[name][0]} | - | fails: {type(error).__name__}: {error} | | | |", flush=True)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda: usage(__doc__), main))
