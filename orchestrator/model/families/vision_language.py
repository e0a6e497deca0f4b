"""Decoders that look at images (transformers, models/{llava,llava_next,llava_onevision,gemma3,internvl,qwen2_vl,qwen2_5_vl,qwen3_vl,
qwen3_vl_moe,qwen3_5,qwen3_5_moe}): a text model that another family reads, and before it the encoder of `vision_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from orchestrator.errors import InputError
from orchestrator.model.architecture import Architecture
from orchestrator.model.families import gemma, gpt_oss, llama, qwen3_next
from orchestrator.model.families.hf import Family, HfConfig
from orchestrator.model.parts.vision import ACTIVATIONS, Vision

FAMILIES: Final = (llama.LLAMA, llama.MISTRAL, llama.PHI3, llama.QWEN3, llama.QWEN3_MOE, gemma.FAMILY, gpt_oss.FAMILY, qwen3_next.FAMILY)
READERS: Final[Mapping[str, Family]] = {kind: family for family in FAMILIES for kind in family.hf_model_types}
"""Families of the text models that are known behind an encoder, by their model_type."""
PLAIN: Final = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
"""The text model as which a text section's own is computed: where all tokens are text, positions in three sections are the plain ones."""
SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size")
LEFT_OUT: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": dict(zip(SIZES, (4096, 11008, 32, 32, 2048, 32000), strict=True)),
    "mistral": dict(zip(SIZES, (4096, 14336, 32, 32, 131072, 32000), strict=True)),
    "gemma3_text": dict(zip(SIZES, (2304, 9216, 26, 8, 131072, 262208), strict=True)),
}
"""What published text sections leave out, as transformers' classes of them have it."""
ROTARY_BASE: Final = {"qwen2_vl": 1_000_000, "qwen2_5_vl": 1_000_000, "qwen3_vl": 500_000, "qwen3_vl_moe": 500_000}
"""Base of the rotary frequencies of a text section that says none, as transformers' class of it has it."""
SECTION: Final = {"llava": "llama", "llava_next": "llama", "llava_onevision": "qwen2", "internvl": "qwen2", "gemma3": "gemma3_text"}
"""The model_type of a text section that says none."""
TOWERS: Final = ("clip_vision_model", "siglip_vision_model")
TOWER: Final = dict.fromkeys(("llava", "llava_next"), TOWERS[0]) | dict.fromkeys(("llava_onevision", "gemma3"), TOWERS[1])
"""The model_type of a tower that says none, of the kinds that have one of several."""
NEWLINE: Final = ("llava_next", "llava_onevision")
IMAGE_TOKEN: Final = {
    "llava": 32000, "llava_next": 32000, "llava_onevision": 151646, "internvl": 151667, "gemma3": 262144,
    "qwen3_5": 248056, "qwen3_5_moe": 248056,
}  # fmt: skip
"""The id of a token of an image where a config.json has none; the other Qwen models' is QWEN_IMAGE."""
QWEN_IMAGE: Final = 151655


def from_hf_config(config: HfConfig, name: str) -> Architecture:
    """The architecture of a config.json of one of these models. Raises InputError."""
    kind: str = config.choice("model_type", VISION)
    section = config.section("vision_config")
    if section is None:
        raise InputError(f"{config.key}.vision_config", None, f"is missing: a {kind} has one")
    text, tied = _text(config, kind, name)
    token = config.integer(
        "image_token_index" if "image_token_index" in config.fields else "image_token_id", IMAGE_TOKEN.get(kind, QWEN_IMAGE)
    )
    vision = replace(VISION[kind](config, section, kind, text), image_token_id=token, mrope_section=_sections(config))
    if vision.hidden_size % vision.num_attention_heads:
        why = f"does not divide hidden_size={vision.hidden_size}"
        raise InputError(f"{section.key}.num_attention_heads", vision.num_attention_heads, why)
    return replace(text, vision=vision, tie_embeddings=tied)


def knows(config: Mapping[str, Any]) -> bool:
    """Whether tower and text model of a config.json of one of these kinds are among those that are read here."""
    tower, text = config.get("vision_config"), config.get("text_config")
    towers = [tower.get("model_type")] if isinstance(tower, Mapping) and config.get("model_type") in TOWER else []
    texts = [text.get("model_type")] if isinstance(text, Mapping) else []
    return all(kind in (None, *TOWERS) for kind in towers) and all(kind is None or PLAIN.get(str(kind), kind) in READERS for kind in texts)


def _text(config: HfConfig, kind: str, name: str) -> tuple[Architecture, bool]:
    """(the text model, whether embedding and head are one). Old files of Qwen have its fields beside `vision_config`."""
    section = config.section("text_config")
    if section is None and kind not in ("qwen2_vl", "qwen2_5_vl"):
        raise InputError(f"{config.key}.text_config", None, f"is missing: a {kind} has one")
    section = section or config
    named = section.fields.get("model_type", SECTION.get(kind, f"{kind}_text"))
    plain = PLAIN.get(str(named), named)
    fields = {**LEFT_OUT.get(str(plain), {}), **section.fields, "model_type": plain}
    if kind in ROTARY_BASE and not {"rope_theta", "rope_parameters"} & fields.keys():
        fields["rope_theta"] = ROTARY_BASE[kind]
    if plain == "qwen2" and named != plain:
        fields.setdefault("rms_norm_eps", 1e-5)
    for scaling in ("rope_scaling", "rope_parameters"):
        found = fields.get(scaling)
        if isinstance(found, Mapping) and "mrope" in (found.get("type"), found.get("rope_type")):
            fields[scaling] = {key: value for key, value in found.items() if key not in ("type", "rope_type")}
    read = HfConfig(fields, section.key)
    text = READERS[read.choice("model_type", READERS)].from_hf_config(read, name)
    alone = "tie_word_embeddings" not in config.fields or kind in TIED_BY_EITHER
    default = text.tie_embeddings if kind in TIED_BY_EITHER else kind in TIED
    return text, config.flag("tie_word_embeddings", default) or (alone and default)


def _sections(config: HfConfig) -> tuple[int, ...]:
    """The channels of a head that turn by time, row and column; () where nothing says so. Raises InputError."""
    text = config.section("text_config") or config
    for field in ("rope_parameters", "rope_scaling"):
        section = text.section(field)
        if section is not None and "mrope_section" in section.fields:
            found = section.fields["mrope_section"]
            if not isinstance(found, list | tuple) or not all(type(each) is int and each > 0 for each in found):
                raise InputError(f"{section.key}.mrope_section", repr(found), "must be numbers of channels")
            return tuple(found)
    return ()


TIED_BY_EITHER: Final = ("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
"""Kinds whose head is tied where the text section says so, though the whole does not."""
TIED: Final = ("gemma3", "internvl")
"""Other kinds whose head is tied where nothing says so."""


def _side(section: HfConfig, field: str, default: int) -> int:
    """A size in pixels that may be a pair of equal ones. Raises InputError."""
    value = section.fields.get(field, default)
    if isinstance(value, list | tuple):
        if len(value) != 2 or value[0] != value[1]:
            raise InputError(f"{section.key}.{field}", repr(value), "must be square")
        value = value[0]
    return HfConfig({field: value}, section.key).integer(field)


def _sizes(section: HfConfig, defaults: tuple[int, int, int, int], act: str, patch: int) -> dict[str, Any]:
    """Fields that the towers of CLIP, SigLIP and InternViT have by the same names. `defaults`: width, layers, heads, width of the MLP."""
    width, layers, heads, ffn = defaults
    return {
        "num_layers": section.integer("num_hidden_layers", layers),
        "hidden_size": section.integer("hidden_size", width),
        "num_attention_heads": section.integer("num_attention_heads", heads),
        "ffn_hidden_size": section.integer("intermediate_size", ffn),
        "hidden_act": section.choice("hidden_act", [act for act in ACTIVATIONS if act != "silu"], act),
        "patch_size": _side(section, "patch_size", patch),
        "num_channels": section.integer("num_channels", 3),
    }


def _still(section: HfConfig, kind: str) -> dict[str, Any]:
    """A tower of CLIP or SigLIP, for images of one size. Raises InputError for another."""
    clip = section.choice("model_type", TOWERS, TOWER[kind]) == "clip_vision_model"
    section.refuse_unless("attention_dropout", 0.0, "no published tower has dropout")
    fields = _sizes(section, (768, 12, 12, 3072), "quick_gelu" if clip else "gelu_pytorch_tanh", 32 if clip else 16)
    side = _side(section, "image_size", 224)
    of_kind: dict[str, Any] = {"pooling_head": section.flag("vision_use_head", True)}
    if clip:
        of_kind = {"patch_bias": False, "class_token": True, "entry_norm": True}
    return (
        fields
        | of_kind
        | {
            "image_size": side,
            "norm_epsilon": section.number("layer_norm_eps", 1e-5 if clip else 1e-6),
            "num_position_embeddings": (side // fields["patch_size"]) ** 2 + clip,
            "final_norm": True,
        }
    )


def _llava(config: HfConfig, section: HfConfig, kind: str, _: Architecture) -> Vision:
    found = _still(section, kind)
    expected = "default" if found.get("class_token") else "full"
    config.choice("vision_feature_select_strategy", (expected,), "full" if kind == "llava_onevision" else "default")
    layer = config.fields.get("vision_feature_layer", -1 if kind == "llava_onevision" else -2)
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise InputError(f"{config.key}.vision_feature_layer", repr(layer), "must be one layer's number")
    config.choice("projector_hidden_act", ("gelu",), "gelu")
    bias = config.flag("multimodal_projector_bias", True)
    return Vision(model_type=kind, projector_bias=bias, feature_layer=layer, newline=kind in NEWLINE, **found)


def _gemma3(config: HfConfig, section: HfConfig, kind: str, _: Architecture) -> Vision:
    found = _still(section, kind)
    rows, tokens = found["image_size"] // found["patch_size"], config.integer("mm_tokens_per_image", 256)
    side = round(tokens**0.5)
    if side * side != tokens or rows % side:
        why = f"must be the square of a number that divides the {rows} patches of an image's side"
        raise InputError(f"{config.key}.mm_tokens_per_image", tokens, why)
    return Vision(model_type=kind, projector="pooled", spatial_merge_size=rows // side, projector_bias=False, **found)


def _internvl(config: HfConfig, section: HfConfig, kind: str, _: Architecture) -> Vision:
    fields, side = _sizes(section, (1024, 24, 16, 4096), "gelu", 14), _side(section, "image_size", 448)
    for field in ("attention_dropout", "hidden_dropout_prob", "projection_dropout"):
        section.refuse_unless(field, 0.0, "no published tower has dropout")
    section.refuse_unless("use_mask_token", False, "no published tower has one")
    config.choice("vision_feature_select_strategy", ("default",), "default")
    config.choice("projector_hidden_act", ("gelu",), "gelu")
    ratio = config.number("downsample_ratio", 0.5)
    merged = round(1 / ratio) if ratio else 0
    if not merged or merged * ratio != 1 or (side // fields["patch_size"]) % merged:
        why = f"must be 1 over a number that divides the {side // fields['patch_size']} patches of an image's side"
        raise InputError(f"{config.key}.downsample_ratio", ratio, why)
    norm, qk_norm = section.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm"), section.flag("use_qk_norm", False)
    if qk_norm and norm != "rms_norm":
        raise InputError(f"{section.key}.use_qk_norm", True, f"with norm_type={norm}: no published tower has both", ["false"])
    learned = section.flag("use_absolute_position_embeddings", True)
    return Vision(
        model_type=kind,
        normalization="RMSNorm" if norm == "rms_norm" else "LayerNorm",
        norm_epsilon=section.number("layer_norm_eps", 1e-6),
        image_size=side,
        class_token=True,
        num_position_embeddings=(side // fields["patch_size"]) ** 2 + 1 if learned else 0,
        final_norm=not section.flag("use_mean_pooling", True),
        qkv_bias=section.flag("attention_bias", False),
        qk_norm=qk_norm,
        layer_scale=True,
        spatial_merge_size=merged,
        projector="shuffled",
        **fields,
    )


def _indexes(section: HfConfig, field: str, default: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Numbers of layers that a tower has. Raises InputError."""
    value = section.fields.get(field, default)
    if not isinstance(value, list | tuple) or not all(type(each) is int and each >= 0 for each in value):
        raise InputError(f"{section.key}.{field}", repr(value), "must be numbers of layers, from 0")
    if beyond := [each for each in value if each >= layers]:
        raise InputError(f"{section.key}.{field}", repr(value), f"has {beyond[0]}, and the tower has {layers} layers")
    return tuple(value)


def _qwen(config: HfConfig, section: HfConfig, kind: str, text: Architecture) -> Vision:
    """Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen3-VL (arXiv 2511.21631), Qwen3.5."""
    second, windows = kind == "qwen2_vl", kind == "qwen2_5_vl"
    width = section.integer("embed_dim", 1280) if second else section.integer("hidden_size", 3584 if windows else 1152)
    layers = section.integer("depth", 32 if second or windows else 27)
    out = section.integer("hidden_size", 3584) if second else section.integer("out_hidden_size", 3584)
    if out != text.hidden_size:
        field = "hidden_size" if second else "out_hidden_size"
        raise InputError(f"{section.key}.{field}", out, f"is not the text model's hidden_size={text.hidden_size}")
    fields: dict[str, Any] = {}
    if windows:
        whole = _indexes(section, "fullatt_block_indexes", (7, 15, 23, 31), layers)
        fields = {"window_size": section.integer("window_size", 112), "fullatt_block_indexes": whole, "normalization": "RMSNorm"}
    elif not second:
        fields = {"num_position_embeddings": section.integer("num_position_embeddings", 2304), "patch_bias": True}
        if kind in ("qwen3_vl", "qwen3_vl_moe"):
            fields["deepstack_visual_indexes"] = _indexes(section, "deepstack_visual_indexes", (8, 16, 24), layers)
    act = "quick_gelu" if second else "silu" if windows else "gelu_pytorch_tanh"
    ffn = width * section.integer("mlp_ratio", 4) if second else section.integer("intermediate_size", 3420 if windows else 4304)
    return Vision(
        model_type=kind,
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=section.integer("num_heads", 16),
        ffn_hidden_size=ffn,
        hidden_act=section.choice("hidden_act", ("silu",) if windows else [each for each in ACTIVATIONS if each != "silu"], act),
        patch_size=_side(section, "patch_size", 14 if second or windows else 16),
        num_channels=section.integer("in_channels", 3),
        temporal_patch_size=section.integer("temporal_patch_size", 2),
        spatial_merge_size=section.integer("spatial_merge_size", 2),
        rotary=True,
        projector="merger",
        **{"patch_bias": False} | fields,
    )


VISION: Final[Mapping[str, Callable[[HfConfig, HfConfig, str, Architecture], Vision]]] = {
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), _llava),
    "gemma3": _gemma3,
    "internvl": _internvl,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen),
}

FAMILY: Final = Family(name="vision_language", from_hf_config=from_hf_config, hf_model_types=tuple(VISION))
