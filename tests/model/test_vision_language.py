"""Models that look at images: their parameters equal published totals, and transformers' own modules', to the last one; images are lengths
of the tower; what can't be expressed is refused by its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace
from published_counts import PUBLISHED as TEXT
from published_counts import QWEN35_WHOLE
from vision_language import PUBLISHED, QWEN3_TOWER, TINY, qwen

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families import describe
from orchestrator.model.families.hf import HfConfig
from orchestrator.model.families.vision_language import from_hf_config
from orchestrator.model.hugging_face import hugging_face
from orchestrator.model.layer import LayerRun
from orchestrator.model.ops import Attention, Gemm
from orchestrator.model.parts.vision import Images


def read(config: dict[str, Any]) -> Architecture:
    return from_hf_config(HfConfig(config), "x")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_checkpoints(name: str) -> None:
    config, published = PUBLISHED[name]
    assert describe(read(config), 4096).parameters == published


@pytest.mark.parametrize("name", [name for name, (_, vision) in QWEN35_WHOLE.items() if vision])
def test_qwen35s_are_those_of_its_text_its_tower_and_its_prediction(name: str) -> None:
    text, _ = TEXT[name]
    tower = QWEN3_TOWER | {"num_position_embeddings": 2304}
    kind = text["model_type"].removesuffix("_text")
    total, vision = QWEN35_WHOLE[name]
    a = read(qwen(kind, tower, text | {"mtp_num_hidden_layers": 1}))
    assert describe(a, 4096).parameters == total
    assert describe(a, 4096).parameters - describe(replace(a, vision=None), 4096).parameters == vision


@pytest.mark.engines
@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_of_transformers(name: str) -> None:
    """As it builds the model on the meta device; what it writes of its config is read like the one by hand."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    theirs = AutoConfig.for_model(**json.loads(json.dumps(TINY[name])))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(theirs)
    ours = describe(read(TINY[name]), 512)
    assert ours.parameters == sum(parameter.numel() for parameter in model.parameters())
    stacks = (".visual.blocks.", ".layers.", ".encoder.layer.")
    tower = [parameter.numel() for path, parameter in model.named_parameters() if any(stack in path for stack in stacks)]
    layers = sum(run.count * run.layer.parameters for run in ours.runs if run.layer.recomputable)
    assert layers == sum(tower)
    written = read(theirs.to_dict())
    assert replace(written, kv_channels=written.head_dim) == replace(read(TINY[name]), kv_channels=written.head_dim)


@pytest.mark.engines
@pytest.mark.parametrize("name", ["gemma3", "internvl", "qwen2_vl", "qwen2_5_vl"])
def test_layers_are_those_that_were_recorded_from_transformers_own_code(name: str) -> None:
    """Of one image of 256 tokens, or of its one size: parameters and products to the last one, layer by layer, and what the tower keeps for
    backward within a tenth."""
    from orchestrator.tracing import build
    from orchestrator.tracing.trace import described

    recorded = described(build.Source(config=json.dumps(TINY[name])), 512, None, 2).runs
    ours = hugging_face(describe(read(TINY[name]), 512, images=Images(count=1, tokens=4 if name in ("gemma3", "internvl") else 256))).runs
    for runs, theirs in ((seen(ours), seen(recorded)), (rest(ours), rest(recorded))):
        assert [work(run) for run in runs] == [work(run) for run in theirs]
    kept = [sum(run.count * run.layer.saved_bytes() for run in runs) for runs in (seen(ours), seen(recorded))]
    assert kept[0] == pytest.approx(kept[1], rel=0.1)


def seen(runs: tuple[LayerRun, ...]) -> list[LayerRun]:
    return [run for run in runs if run.layer.recomputable and "ision" in run.layer.kind + "Vision" * ("Siglip" in run.layer.kind)]


def rest(runs: tuple[LayerRun, ...]) -> list[LayerRun]:
    """The other layers that are recomputed, each by itself."""
    found = [run for run in runs if run.layer.recomputable and run not in seen(runs)]
    return [replace(run, count=1) for run in found for _ in range(run.count)]


def work(run: LayerRun) -> tuple[int, int, int, int]:
    """(layers, parameters of each, multiplications of its products, and of its attention)."""
    gemms = sum(op.tokens * op.k * op.n for op in run.layer.ops if isinstance(op, Gemm))
    pairs = sum(op.query_len * op.key_len * op.heads * op.head_dim for op in run.layer.ops if isinstance(op, Attention))
    return run.count, run.layer.parameters, gemms, pairs


@pytest.mark.engines
@pytest.mark.parametrize(("frozen", "key"), [("visual.blocks", None), ("visual", "vision,projector"), ("language_model", None), ("", None)])
def test_what_a_script_has_frozen_of_its_module_is_frozen_in_its_plan(frozen: str, key: str | None) -> None:
    """Patches are of the tower, and the head of the text model."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from orchestrator.api import frozen_of

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**json.loads(json.dumps(TINY["qwen2_5_vl"]))))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    assert frozen_of(model).get("train.freeze") == key
    assert frozen_of(model.config) == {}


@pytest.mark.parametrize(
    ("name", "tokens", "vectors"),
    [("llava-1.5-7b", 576, 577), ("gemma-3-4b", 256, 4096), ("InternVL3-8B", 256, 1025), ("llava-onevision-qwen2-7b-ov", 729, 729)],
)
def test_an_image_of_one_size_is_so_many_tokens(name: str, tokens: int, vectors: int) -> None:
    """LLaVA 1.5: 336 pixels in patches of 14 (arXiv 2310.03744); Gemma 3: 896 pixels, 4,096 patches to 256 tokens (arXiv 2503.19786,
    section 2.1); InternVL: 448 pixels, 1,024 patches to 256 tokens."""
    spec = describe(read(PUBLISHED[name][0]), 4096)
    assert spec.architecture.vision is not None
    assert spec.images == Images(count=1, tokens=tokens)
    assert spec.images.length(spec.architecture.vision) == vectors


def products(config: dict[str, Any], images: Images, kind: str) -> list[Gemm]:
    return [op for op in describe(read(config), 4096, images=images).kind(kind).ops if isinstance(op, Gemm)]


def test_the_tower_works_on_patches_and_the_projector_on_tokens() -> None:
    """Three images of 448 x 448 pixels: 32 x 32 patches of 14, of which 2 x 2 become one token."""
    config, images = PUBLISHED["Qwen2.5-VL-7B"][0], Images(count=3, tokens=256)
    assert [(op.tokens, op.k, op.n) for op in products(config, images, "patches")] == [(3 * 1024, 3 * 2 * 14 * 14, 1280)]
    assert [(op.tokens, op.k, op.n) for op in products(config, images, "vision")] == [
        *((3072, 1280, 3 * 1280), (3072, 1280, 1280), (3072, 1280, 2 * 3420), (3072, 3420, 1280)),
    ]
    assert [(op.tokens, op.k, op.n) for op in products(config, images, "projector")] == [(768, 5120, 5120), (768, 5120, 3584)]
    assert {op.tokens for op in products(config, images, "decoder")} == {4096}


def attention(config: dict[str, Any], images: Images, kind: str) -> tuple[int, int, int, bool]:
    (op,) = (op for op in describe(read(config), 4096, images=images).kind(kind).ops if isinstance(op, Attention))
    return op.heads, op.query_len, op.key_len, op.causal


def test_attention_stays_inside_an_image_and_inside_a_window() -> None:
    """Windows of 112 pixels are 8 x 8 patches of 14; 16 x 16 tokens of 2 x 2 patches have 16 of them."""
    config = PUBLISHED["Qwen2.5-VL-7B"][0]
    assert attention(config, Images(count=2, tokens=256), "vision") == (16 * 2, 1024, 1024, False)
    assert attention(config, Images(count=2, tokens=256), "vision_window") == (16 * 2 * 16, 64, 64, False)
    runs = describe(read(config), 4096).runs
    assert [(run.layer.kind, run.count) for run in runs[2:6]] == [("vision_window", 7), ("vision", 1)] * 2


CLIP, QWEN = TINY["llava"], TINY["qwen2_5_vl"]


def with_vision(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    return config | {"vision_config": config["vision_config"] | more}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llava", "text_config": CLIP["text_config"]}, "vision_config: is missing: a llava has one"),
        ({name: value for name, value in CLIP.items() if name != "text_config"}, "text_config: is missing: a llava has one"),
        (with_vision(CLIP, model_type="eva"), "vision_config.model_type='eva': can't be expressed; choose one of clip_vision_model, sigl"),
        (with_vision(CLIP, image_size=[28, 56]), "image_size=[28, 56]: must be square"),
        (with_vision(CLIP, hidden_act="silu"), "hidden_act='silu': can't be expressed; choose one of gelu, "),
        (with_vision(CLIP, num_attention_heads=5), "num_attention_heads=5: does not divide hidden_size=32"),
        (with_vision(CLIP, attention_dropout=0.1), "attention_dropout=0.1: no published tower has dropout"),
        (CLIP | {"vision_feature_layer": [-2, -5]}, "vision_feature_layer=[-2, -5]: must be one layer's number"),
        (CLIP | {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy='full': can't be expressed; choose one of def"),
        (CLIP | {"text_config": {"model_type": "opt"}}, "text_config.model_type='opt': can't be expressed; choose one of llama, "),
        (TINY["gemma3"] | {"mm_tokens_per_image": 9}, "mm_tokens_per_image=9: must be the square of a number that divides the 4 patches"),
        (TINY["internvl"] | {"downsample_ratio": 0.3}, "downsample_ratio=0.3: must be 1 over a number that divides the 4 patches"),
        (with_vision(TINY["internvl"], use_qk_norm=True), "use_qk_norm=True: with norm_type=layer_norm: no published tower has both"),
        (with_vision(QWEN, out_hidden_size=32), "out_hidden_size=32: is not the text model's hidden_size=64"),
        (with_vision(QWEN, fullatt_block_indexes=[9]), "fullatt_block_indexes=[9]: has 9, and the tower has 4 layers"),
        (with_vision(QWEN, fullatt_block_indexes=7), "fullatt_block_indexes=7: must be numbers of layers, from 0"),
    ],
)
def test_what_can_not_be_expressed_is_refused_by_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        read(config)
    assert message in str(raised.value)
