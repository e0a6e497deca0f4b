"""A plan's model as a configuration of Hugging Face transformers (class, keywords, attention, data type, checkpointing), and why some
models have none there. For engines that train transformers' models, and for weights that go to or come from them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from orchestrator.engines.megatron_parts import attentions, mixers
from orchestrator.engines.transformer_config import TORCH_DTYPE
from orchestrator.hardware.spec import Cluster
from orchestrator.model.architecture import Layer
from orchestrator.model.families.decoder import LLAMA3_ROPE
from orchestrator.model.lora import Lora, target_names
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.part import Nothing
from orchestrator.model.parts.vision import Vision
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.strategy.legality import LEFT_OUT
from orchestrator.words import hugging_face as words
from orchestrator.words.terms import Table, Term, fixed, inside, named, say

DEEPSEEK_YARN: Final = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
"""DeepSeek's constants of YaRN, for which `LatentAttention.yarn_mscale` is made."""

FLASH_PRECISIONS: Final = ("bf16", "fp16")
FLASH_COMPUTE_CAPABILITY: Final = 8.0
"""The flash-attn package runs on Ampere and later, in 16 bits."""


def attention_implementation(plan: Plan) -> str:
    """The word by which transformers chooses its attention: flash_attention_2 where the package runs, else torch's own
    scaled_dot_product_attention. T5's relative bias, Llama 4's chunks and Gemma 3's images, whose tokens see each other, need the latter,
    and transformers' models without attention take neither word."""
    parts, vision = plan.model.features(), plan.model.vision
    if not {"attention", "latent_attention"} & {*parts}:
        return "eager"
    masked = vision is not None and vision.model_type == "gemma3"
    if plan.model.stack == "encoder_decoder" or "chunked_attention" in parts or masked:
        return "sdpa"
    return "flash_attention_2" if takes_flash_attention(plan.cluster, plan.training) else "sdpa"


def takes_flash_attention(cluster: Cluster, training: Training) -> bool:
    """Whether the flash-attn package is there, and runs on this GPU in this precision."""
    if cluster.is_cpu or not cluster.software.flash_attention:
        return False
    return training.precision in FLASH_PRECISIONS and float(cluster.gpu.compute_capability) >= FLASH_COMPUTE_CAPABILITY


def _rope(a: Architecture) -> dict[str, Any]:
    mixer, kind, more = _mixer(a), "llama3", LLAMA3_ROPE
    if "latent_yarn" in mixer.features(a):
        kind, more = "yarn", {**DEEPSEEK_YARN, "mscale": mixer.yarn_mscale, "mscale_all_dim": mixer.yarn_mscale_all_dim or 0.0}
    elif a.rope_scaling_factor is None or a.rope_scaling_type == "linear":
        kind, more = "default" if a.rope_scaling_factor is None else "linear", {}
    factor = {} if a.rope_scaling_factor is None else {"factor": a.rope_scaling_factor}
    return {"rope_type": kind, "rope_theta": float(a.rotary_base), **factor, **more}


def window_of(layer: Layer) -> int | None:
    """Tokens that a layer's attention sees; None: all."""
    return layer.mixer.window if isinstance(layer.mixer, GroupedQueryAttention) else None


def _mixer(a: Architecture) -> Any:
    """The mixer of the first layer; of a hybrid model, that of the first with states."""
    return next(iter(mixers(Mamba2, a.each_layer())), next(a.each_layer()).mixer)


def _local(a: Architecture) -> GroupedQueryAttention:
    """The first attention with a window; the first of all where none has one."""
    layers = attentions(a.each_layer())
    return next((mixer for mixer in layers if mixer.window is not None), layers[0])


def _first(a: Architecture, name: str, otherwise: Any = None) -> Any:
    """The first value of an attribute that a layer's attention has."""
    return next((value for mixer in attentions(a.each_layer()) if (value := getattr(mixer, name)) is not None), otherwise)


KIND_OF_LAYER: Final = {
    ("mamba2", "none"): "linear_attention",
    ("attention", "none"): "full_attention",
    ("none", "mlp"): "mlp",
    ("none", "experts"): "moe",
}
"""transformers' words for Nemotron-H's layers, by the kinds of their two parts."""


def _kinds(a: Architecture) -> list[str | None]:
    """The word of each layer's kind; None: Nemotron-H has none like it."""
    tags = ((layer.mixer.__struct_config__.tag, layer.feed_forward.__struct_config__.tag) for layer in a.each_layer())
    return [KIND_OF_LAYER.get((str(mixer), str(feed_forward))) for mixer, feed_forward in tags]


def _but(table: Table, name: str) -> Table:
    """The table without one of its settings."""
    return [term for term in table if term.theirs != name]


def _routed(more: Table) -> Table:
    """A decoder's settings and those of its experts. `more`: what its class says of them in its own words."""
    return *DECODER, *inside(lambda a: a.experts[0], (*words.ROUTED, *more))


NO_BIASES, NO_PADDING = fixed("attention_bias", False), fixed("pad_token_id", None)
DECODER: Final[Table] = (*words.ROTARY, Term("rope_parameters", "", of=_rope))
WINDOWED: Final[Table] = (*DECODER, Term("sliding_window", "", of=lambda a: next(map(window_of, a.each_layer()))))
PARTLY_ROTARY: Final = Term("rope_parameters", "", of=lambda a: _rope(a) | {"partial_rotary_factor": a.rotary_percent})
SIGMOID_ROUTED: Final[Table] = (
    *_routed(words.SIGMOID),
    Term("first_k_dense_replace", "", of=lambda a: sum(isinstance(layer.feed_forward, Mlp) for layer in a.each_layer())),
    Term("attention_bias", "add_qkv_bias"),
    fixed("num_nextn_predict_layers", 0),
)
"""GLM-4.5's and DeepSeek-V3's settings of a model."""


class Lack(NamedTuple):
    """What some models have and a class of transformers has not. `found`: what of a model the class can't have, or nothing that counts as
    true. `why`: the complaint, in which {found} is that, {a} the model, {e} its experts, {biases} its biases and {name} the class."""

    found: Callable[[Architecture], object]
    why: str


class HfClass(NamedTuple):
    """A model class of transformers, named with its configuration's; the settings of that, and what it is made of. `parts`: in the words of
    `Architecture.features`. `lacks`: what no other field says."""

    config: str
    model: str
    settings: Table
    activations: tuple[str, ...]
    normalization: str
    position_embedding: str
    parts: tuple[str, ...]
    lacks: tuple[Lack, ...]

    def complaints(self, a: Architecture, name: str) -> list[str]:
        """What of `lacks` a model has, in words; `name`: of this class."""
        held = [(lack.why, found) for lack in self.lacks if (found := lack.found(a))]
        biases = f"add_bias_linear={a.add_bias_linear} add_qkv_bias={a.add_qkv_bias}".lower()
        return [why.format(found=found, a=a, e=(*a.experts, None)[0], biases=biases, name=name) for why, found in held]


def _always(*parts: str) -> tuple[Lack, ...]:
    """The complaints about models without parts that a class has always."""
    return tuple(Lack(lambda a, part=part: part not in a.features(), f"transformers' {{name}} is not without {part}") for part in parts)  # type: ignore[misc]


def _dense_behind_experts(a: Architecture) -> bool:
    dense = [isinstance(layer.feed_forward, Mlp) for layer in a.each_layer()]
    return dense != sorted(dense, reverse=True)


def _mixed_kinds(a: Architecture, *, rotary: bool) -> bool:
    """Whether Llama 4's layers with rotary positions, or those without, are of several kinds, or have what the others have."""
    kinds = {(mixer.chunk, mixer.qk_norm, mixer.temperature) for mixer in attentions(a.kinds_of_layers()) if mixer.rotary is rotary}
    wrong = any((temperature if rotary else chunk or norm) is not None for chunk, norm, temperature in kinds)
    return wrong or len(kinds) > 1


def _one_mamba(a: Architecture) -> Mamba2 | None:
    """The mixer of a model that has nothing but layers of one Mamba-2; None: it has others."""
    found = {layer.mixer for layer in a.each_layer()}
    mixer = next(iter(found))
    alone = len(found) == 1 and all(isinstance(layer.feed_forward, Nothing) for layer in a.each_layer())
    return mixer if alone and isinstance(mixer, Mamba2) else None


def _uneven_channels(a: Architecture) -> int:
    """Channels of the only Mamba-2 of a model where they are no multiple of the hidden size, else 0."""
    mixer = _one_mamba(a)
    return 0 if mixer is None or mixer.inner_size % a.hidden_size == 0 else mixer.inner_size


LATENT_EPSILON: Final = 1e-6
"""Epsilon of the norms of latent vectors: DeepseekV3RMSNorm's default, with which DeepseekV3Attention makes them."""
GROUP_SCORES: Final = 2
"""Experts by whose scores DeepSeek-V3's router values a group (modeling_deepseek_v3.py, route_tokens_to_experts); megatron-core sums the
best topk/group_topk (moe_utils.py, group_limited_topk)."""

NO_GROUPS: Final = Lack(
    lambda a: a.query_groups != a.num_attention_heads, "num_query_groups={a.query_groups}: transformers' {name} has no grouped queries"
)
BIASES_EVERYWHERE: Final = (
    Lack(lambda a: not a.add_bias_linear, "add_bias_linear=false: the linears of transformers' {name} have biases"),
    Lack(lambda a: a.head_dim * a.num_attention_heads != a.hidden_size,
         "kv_channels={a.head_dim}: transformers' {name} has heads of hidden_size/num_attention_heads"),
    NO_GROUPS,
)  # fmt: skip
ATTENTION_DROPOUT: Final = Lack(
    lambda a: a.hidden_dropout, "hidden_dropout={a.hidden_dropout}: transformers' {name} has attention dropout only"
)
HEAD_NORMS: Final = (
    Lack(lambda a: "qk_norm" not in a.features(), "qk_norm=null: transformers' {name} norms queries and keys"),
    Lack(lambda a: a.add_bias_linear or a.add_qkv_bias, "{biases}: our {name} has no biases"),
    ATTENTION_DROPOUT,
)
BARE: Final = (
    Lack(lambda a: a.add_bias_linear or a.add_qkv_bias, "{biases}: transformers' {name} has no biases"),
    ATTENTION_DROPOUT,
)
"""Classes without any bias, and with no dropout but attention's."""
ONE_WINDOW: Final = (
    Lack(lambda a: len(set(map(window_of, a.each_layer()))) > 1,
         "pattern: transformers' {name} has the same window in all layers"),
    *BARE,
)  # fmt: skip
GEMMA: Final = ("sandwich_norm", "zero_centered_norm", "embedding_scale")
PLAIN_EXPERTS: Final = Lack(
    lambda a: a.experts[0].scaling != 1.0, "experts.scaling={e.scaling}: transformers' {name} does not scale scores"
)
SIGMOID_EXPERTS: Final = (
    Lack(lambda a: a.experts[0].score != "sigmoid" or not a.experts[0].expert_bias,
         "experts.score={e.score}: transformers' {name} has sigmoids with a bias"),
    Lack(lambda a: not (shared := a.experts[0].shared_ffn_hidden_size) or shared % a.experts[0].ffn_hidden_size,
         "shared_ffn_hidden_size={e.shared_ffn_hidden_size}: transformers' {name} has shared experts as wide as the others"),
    Lack(_dense_behind_experts, "pattern: transformers' {name} has dense layers before those with experts only"),
    Lack(lambda a: a.add_bias_linear, "add_bias_linear=true: transformers' {name} has no biases but of Q, K and V"),
    ATTENTION_DROPOUT,
)  # fmt: skip
"""GLM-4.5's complaints, and DeepSeek-V3's, whose router it has."""
ONE_PART_LAYERS: Final = (*_always("single_part_layers", "mamba2"), *BARE)
ROTARY: Final = ("attention", "mlp", "llama3_rope")
ROUTED: Final = ("attention", "experts", "llama3_rope")
SIGMOID: Final = ("mlp", "shared_experts", "sigmoid_router", "grouped_router", "expert_bias")
GLU: Final = ("swiglu", "geglu")


def _decoder(
    name: str,
    settings: Table,
    parts: Sequence[str],
    lacks: tuple[Lack, ...],
    *activations: str,
    position: str = "rope",
    config: str = "Config",
) -> HfClass:
    """A decoder with RMSNorm, and with SwiGLU where no other activation is said; by its class's name without its ending."""
    return HfClass(name + config, f"{name}ForCausalLM", (*settings,), activations or ("swiglu",), "RMSNorm", position, tuple(parts), lacks)


GPT2: Final = HfClass(
    *("GPT2Config", "GPT2LMHeadModel", words.GPT2, ("gelu", "relu"), "LayerNorm", "learned_absolute"),
    *(("attention", "mlp"), BIASES_EVERYWHERE),
)
LLAMA: Final = _decoder("Llama", (*DECODER, *named("attention_bias=add_bias_linear mlp_bias=add_bias_linear")), ROTARY, (
    Lack(lambda a: a.add_qkv_bias and not a.add_bias_linear,
         "add_qkv_bias=true: transformers' {name} has biases on all linears or none"),
    ATTENTION_DROPOUT,
), *GLU)  # fmt: skip
QWEN2: Final = _decoder("Qwen2", DECODER, ROTARY, (
    Lack(lambda a: not a.add_qkv_bias or a.add_bias_linear, "{biases}: transformers' {name} has biases on Q, K and V only"),
    ATTENTION_DROPOUT,
), *GLU)  # fmt: skip
QWEN3: Final = _decoder("Qwen3", (*DECODER, NO_BIASES), (*ROTARY, "qk_norm"), HEAD_NORMS, *GLU)
MIXTRAL: Final = _decoder("Mixtral", (*_routed(words.MIXTRAL), fixed("sliding_window", None)), ROUTED, (
    Lack(lambda a: not a.experts[0].normalized, "experts.normalized=false: transformers' {name} makes scores sum to one"),
    PLAIN_EXPERTS,
    *BARE,
))  # fmt: skip
QWEN3_MOE: Final = _decoder("Qwen3Moe", (*_routed(words.QWEN3_MOE), NO_BIASES), (*ROUTED, "qk_norm"), (PLAIN_EXPERTS, *HEAD_NORMS))
GLM4_MOE: Final = _decoder(
    *("Glm4Moe", (*SIGMOID_ROUTED, Term("use_qk_norm", "", of=lambda a: "qk_norm" in a.features()), PARTLY_ROTARY)),
    *((*ROUTED, *SIGMOID, "qk_norm", "partial_rotary"), SIGMOID_EXPERTS),
)
DEEPSEEK_V3: Final = _decoder("DeepseekV3", (
    *_but(SIGMOID_ROUTED, "head_dim"),
    Term("num_key_value_heads", "num_attention_heads"),
    *inside(_mixer, words.LATENT_ATTENTION),
), ("latent_attention", "full_rank_queries", "latent_yarn", "experts", *SIGMOID), SIGMOID_EXPERTS)  # fmt: skip
MISTRAL: Final = _decoder("Mistral", WINDOWED, (*ROTARY, "window"), ONE_WINDOW)
PHI3: Final = _decoder(
    *("Phi3", (*WINDOWED, PARTLY_ROTARY, *named("original_max_position_embeddings=max_position_embeddings"), NO_PADDING)),
    *(("attention", "mlp", "window", "partial_rotary"), ONE_WINDOW),
)
POST_NORMS: Final = ("qk_norm_hidden", "post_norm")
OLMO2: Final = _decoder("Olmo2", (*DECODER, NO_BIASES, NO_PADDING), ("attention", "mlp", *POST_NORMS), (*_always(*POST_NORMS), *BARE))
GEMMA3: Final = _decoder("Gemma3", (
    *_but(DECODER, "hidden_act"),
    fixed("hidden_activation", "gelu_pytorch_tanh"),
    Term("layer_types", "", of=lambda a: ["full_attention" if mixer.window is None else "sliding_attention"
                                          for mixer in attentions(a.each_layer())]),
    Term("sliding_window", "", of=lambda a: _local(a).window),
    Term("query_pre_attn_scalar", "", of=lambda a: int(_local(a).score_width or a.head_dim)),
    Term("rope_parameters", "", of=lambda a: {
        "full_attention": _rope(a),
        "sliding_attention": {"rope_type": "default", "rope_theta": float(_local(a).rotary_base or a.rotary_base)},
    }),
    NO_BIASES,
    NO_PADDING,
), ("attention", "mlp", "window", "qk_norm", "mixed_rope", "linear_rope", "score_width", *GEMMA), (
    *_always("qk_norm", *GEMMA),
    *BARE,
    Lack(lambda a: not any(mixer.window for mixer in attentions(a.kinds_of_layers())),
         "pattern: transformers' {name} has windows in some layers"),
    Lack(lambda a: a.rope_scaling_factor is not None
         and any(mixer.window and mixer.rotary_scaled for mixer in attentions(a.kinds_of_layers())),
         "rotary_scaled=true: transformers' {name} scales no rotary frequencies in layers with a window"),
    Lack(lambda a: len(mixers := attentions(a.kinds_of_layers())) > 2
         or any(not mixer.window and mixer.rotary_base not in (None, a.rotary_base) for mixer in mixers),
         "pattern: transformers' {name} has two kinds of layers, of which those with a window have rotary frequencies of their own"),
    Lack(lambda a: len({mixer.score_width for mixer in attentions(a.kinds_of_layers())}) > 1,
         "score_width: transformers' {name} has one for all layers"),
    Lack(lambda a: min((width for mixer in attentions(a.kinds_of_layers()) if (width := mixer.score_width or 0) % 1), default=0),
         "score_width={found}: transformers' {name} takes an integer"),
), "geglu", config="TextConfig")  # fmt: skip
LLAMA4: Final = _decoder("Llama4", (  # a prediction of its kind has what its own experts have, and as wide a shared one
    *_routed(words.MIXTRAL),
    Term("intermediate_size_mlp", "ffn_hidden_size"),
    Term("moe_layers", "", of=lambda a: [index for index, layer in enumerate(a.each_layer()) if not isinstance(layer.feed_forward, Mlp)]),
    Term("no_rope_layers", "", of=lambda a: [int(mixer.rotary) for mixer in attentions(a.each_layer())]),
    Term("attention_chunk_size", "", of=lambda a: _first(a, "chunk")),
    Term("use_qk_norm", "", of=lambda a: any(mixer.qk_norm == "l2" for mixer in attentions(a.each_layer()))),
    Term("attn_temperature_tuning", "", of=lambda a: _first(a, "temperature") is not None),
    Term("attn_scale", "", of=lambda a: _first(a, "temperature", (0.1, 8192.0))[0]),
    Term("floor_scale", "", of=lambda a: int(_first(a, "temperature", (0.1, 8192.0))[1])),
    fixed("router_aux_loss_coef", 0.0),
    NO_BIASES,
    NO_PADDING,
), (*ROUTED, "mlp", "shared_experts", "sigmoid_router", "scores_on_input", "qk_l2_norm", "chunked_attention", "query_temperature",
    "no_rope_layers"), (
    *_always("scores_on_input", "shared_experts"),
    *BARE,
    Lack(lambda a: (of := a.experts[0]).score != "sigmoid" or of.normalized or of.scaling != 1.0 or of.expert_bias,
         "experts.score={e.score}: transformers' {name} has sigmoids as they are"),
    Lack(lambda a: a.experts[0].shared_ffn_hidden_size != a.experts[0].ffn_hidden_size,
         "shared_ffn_hidden_size={e.shared_ffn_hidden_size}: transformers' {name} has a shared expert as wide as the others"),
    Lack(lambda a: _mixed_kinds(a, rotary=True),
         "pattern: transformers' {name} has one kind of layers with rotary=true, without temperature"),
    Lack(lambda a: _mixed_kinds(a, rotary=False),
         "pattern: transformers' {name} has one kind of layers with rotary=false, without chunk and qk_norm"),
), config="TextConfig")  # fmt: skip
MAMBA2: Final = _decoder("Mamba2", (
    *named("num_hidden_layers=num_layers hidden_size layer_norm_epsilon=norm_epsilon"),
    *inside(_mixer, words.MAMBA2),
    Term("expand", "", of=lambda a: _mixer(a).inner_size // a.hidden_size),
    NO_PADDING,
), ("mamba2", "single_part_layers"), (
    Lack(lambda a: _one_mamba(a) is None, "pattern: transformers' {name} has nothing but layers of one Mamba-2"),
    Lack(_uneven_channels, "hidden_size={a.hidden_size}: transformers' {name} has {found} channels, a multiple of it"),
    *ONE_PART_LAYERS,
), position="none")  # fmt: skip
NEMOTRON_H: Final = _decoder("NemotronH", (
    *words.SIZES,
    Term("layers_block_type", "", of=_kinds),
    *inside(_mixer, words.NEMOTRON_MAMBA),
    Term("layer_norm_epsilon", "norm_epsilon"),
    NO_PADDING,
    *inside(lambda a: (*a.experts, None)[0], words.NEMOTRON_EXPERTS),
), ("mamba2", "single_part_layers", "attention", "experts", *SIGMOID), (
    *ONE_PART_LAYERS,
    Lack(lambda a: None in _kinds(a), "pattern: transformers' {name} has layers of one part"),
    Lack(lambda a: len(a.experts) > 1 or len({*mixers(Mamba2, a.each_layer())}) > 1,
         "pattern: transformers' {name} has one size of state space, and one of experts"),
    Lack(lambda a: any(isinstance(layer.feed_forward, Mlp) and layer.feed_forward.ffn_hidden_size for layer in a.each_layer()),
         "mlp.ffn_hidden_size: transformers' {name} has one for all layers"),
    Lack(lambda a: next((of.score for of in a.experts
                         if of.score != "sigmoid" or not of.expert_bias or not of.shared_ffn_hidden_size), ""),
         "experts.score={found}: transformers' {name} has sigmoids with a bias, and a shared expert"),
), "relu2", position="none")  # fmt: skip
DENSE: Final = (GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, PHI3, OLMO2, GEMMA3, MAMBA2, NEMOTRON_H)
OF_FAMILY: Final = {"phi3": PHI3, "glm4_moe": GLM4_MOE, "deepseek": DEEPSEEK_V3}
"""The class of a family's models also where another class could compute them as well, or lacks as little of them."""
WITH_EXPERTS: Final = (MIXTRAL, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3, LLAMA4, NEMOTRON_H)
"""The first that has all of a model is its class. One more class is a line here, and its keywords."""
BERT: Final = HfClass(
    # A padding token's embedding would neither learn nor be counted in the norm.
    *("BertConfig", "BertForMaskedLM", (*words.BERT, NO_PADDING), ("gelu", "relu"), "LayerNorm", "learned_absolute"),
    *(("attention", "mlp", "encoder"), BIASES_EVERYWHERE),
)
T5: Final = HfClass(
    *("T5Config", "T5ForConditionalGeneration", words.T5, ("relu", "geglu"), "RMSNorm", "relative"),
    *(("attention", "mlp", "encoder_decoder", "relative_bias"), (
        Lack(lambda a: a.add_bias_linear, "add_bias_linear=true: the linears of transformers' {name} have no biases"),
        NO_GROUPS,
        Lack(lambda a: a.hidden_dropout != a.attention_dropout,
             "hidden_dropout={a.hidden_dropout} attention_dropout={a.attention_dropout}: transformers' {name} has one dropout rate"),
    )),
)  # fmt: skip
PARTS: Final = (*dict.fromkeys(word for found in (*DENSE, *WITH_EXPERTS, BERT, T5) for word in found.parts), "vision")
"""What transformers' classes have between them: those that DeepSpeed trains here."""


def _complaints(a: Architecture, of: HfClass) -> list[str]:
    """Why this is not the model's class."""
    name = of.model
    given = (
        ("activation", a.activation, of.activations),
        ("normalization", a.normalization, (of.normalization,)),
        ("position_embedding", a.position_embedding, (of.position_embedding,)),
    )
    whys = [f"{key}={value}: transformers' {name} has {', '.join(offered)}" for key, value, offered in given if value not in offered]
    if a.rope_scaling_factor is not None and of.position_embedding != "rope":
        whys.append(f"rope_scaling_factor={a.rope_scaling_factor}: transformers' {name} has no rotary positions")
    lacking = [word for word in a.features() if word not in of.parts and not (word.endswith("_rope") and whys)]
    return [*whys, *(f"transformers' {name} has no {word}{_way_without(word)}" for word in lacking), *of.complaints(a, name)]


def _way_without(part: str) -> str:
    return f"; {LEFT_OUT[part]}" if part in LEFT_OUT else ""


@lru_cache(maxsize=16)
def class_of(a: Architecture) -> HfClass:
    """The first class that has all of this model, else its family's, else the one with the fewest reasons against it. A model that looks
    at images is of the class of its kind, around its text model's."""
    if a.vision is not None:
        inner = class_of(replace(a, vision=None))
        name = SEEING[a.vision.model_type]
        parts = (*inner.parts, "vision")
        return inner._replace(config=f"{name}Config", model=f"{name}ForConditionalGeneration", parts=parts)
    candidates = {"decoder": WITH_EXPERTS if a.experts else DENSE, "encoder": (BERT,), "encoder_decoder": (T5,)}[a.stack]
    against = {found.model: len(_complaints(a, found)) for found in candidates}
    return min(candidates, key=lambda found: (against[found.model] > 0, found is not OF_FAMILY.get(a.family, found), against[found.model]))


SEEING: Final = {
    "llava": "Llava", "llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision", "gemma3": "Gemma3", "internvl": "InternVL",
    "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe",
}  # fmt: skip
"""How the names of transformers' classes of models that look at images begin, by model_type."""
PLAIN_TEXT: Final = {LLAMA: "llama", QWEN2: "qwen2", QWEN3: "qwen3", MISTRAL: "mistral", PHI3: "phi3", GEMMA3: "gemma3_text",
                     QWEN3_MOE: "qwen3_moe"}  # fmt: skip
"""The model_type of a text section, by the class of the text model alone."""
OWN_TEXT: Final = {"qwen2_vl": QWEN2, "qwen2_5_vl": QWEN2, "qwen3_vl": QWEN3, "qwen3_vl_moe": QWEN3_MOE}
"""The class that computes what the text section of such a kind does, which is one of its own."""


def _seeing(a: Architecture) -> dict[str, Any]:
    """The keywords of a model that looks at images: those of its text model in a section, and its tower's in another."""
    v = a.vision
    assert v is not None
    text, inner = replace(a, vision=None), class_of(replace(a, vision=None))
    section = {"model_type": f"{v.model_type}_text" if v.model_type in OWN_TEXT else PLAIN_TEXT[inner]} | config_keywords(text)
    if v.mrope_section:
        section["rope_parameters"] = section["rope_parameters"] | {"mrope_section": list(v.mrope_section)}
    if v.model_type in OWN_TEXT:
        return {"text_config": section, "vision_config": _moving(v, a), "image_token_id": v.image_token_id}
    if v.model_type == "internvl":
        tower = {"model_type": "internvl_vision"} | say(words.INTERN, v)
        ratio = 1 / v.spatial_merge_size
        return {"text_config": section, "vision_config": tower, "image_token_id": v.image_token_id, "downsample_ratio": ratio}
    clip = v.class_token
    tower = {"model_type": "clip_vision_model" if clip else "siglip_vision_model"} | say(words.STILL if clip else words.SIGLIP, v)
    whole = {"text_config": section, "vision_config": tower, "image_token_index": v.image_token_id}
    if v.model_type == "gemma3":
        return whole | {"mm_tokens_per_image": v.image_tokens}
    layer = {"vision_feature_layer": v.feature_layer, "vision_feature_select_strategy": "default" if clip else "full"}
    return whole | layer | {"multimodal_projector_bias": v.projector_bias}


def _moving(v: Vision, a: Architecture) -> dict[str, Any]:
    """The section of one of Qwen's towers."""
    found = say(words.MOVING, v)
    if v.model_type == "qwen2_vl":
        mine = {"embed_dim": v.hidden_size, "hidden_size": a.hidden_size, "mlp_ratio": v.ffn_hidden_size // v.hidden_size}
        return {name: value for name, value in found.items() if name != "intermediate_size"} | mine
    found["out_hidden_size"] = a.hidden_size
    if v.window_size is not None:
        return found | {"window_size": v.window_size, "fullatt_block_indexes": list(v.fullatt_block_indexes)}
    found["num_position_embeddings"] = v.num_position_embeddings
    return found | {"deepstack_visual_indexes": list(v.deepstack_visual_indexes)}


def _wrong_text(a: Architecture) -> str | None:
    """Why transformers has no model of this kind around this text model; None: it has."""
    v = a.vision
    assert v is not None
    inner = class_of(replace(a, vision=None))
    if v.model_type not in SEEING:
        return f"model.vision of {v.model_type}: engine=deepspeed has {', '.join(SEEING)}"
    expected = OWN_TEXT.get(v.model_type)
    if (expected is not None and inner is not expected) or inner not in PLAIN_TEXT:
        return f"model.vision of {v.model_type} before a text model of transformers' {inner.model}"
    return None


def inexpressible(a: Architecture) -> str | None:
    """Why transformers has no class for this architecture; None: it has."""
    if a.vision is not None and (why := _wrong_text(a)):
        return why
    return next(iter(_complaints(a, class_of(a))), None)


def other_in_megatron(a: Architecture) -> str | None:
    """Why megatron-core, which has one epsilon for all norms and values a group of experts by its best topk/group_topk, computes another
    function than transformers' class of this model; None: it does not."""
    found, own = class_of(a), "engine=deepspeed trains transformers' own"
    if "latent_attention" in a.features() and a.norm_epsilon != LATENT_EPSILON:
        why = f"norm_epsilon={a.norm_epsilon}: transformers' {found.model} has {LATENT_EPSILON} in the norms of latent vectors"
        return f"{why}, megatron-core one epsilon for all norms; {own}"
    for part in a.experts if found in (GLM4_MOE, DEEPSEEK_V3) else ():
        if part.group_topk and part.topk // part.group_topk != GROUP_SCORES:
            why = f"experts.topk={part.topk}: transformers' {found.model} values a group by its {GROUP_SCORES} best experts"
            return f"{why}, megatron-core by its {part.topk // part.group_topk}; {own}"
    return None


def model_classes(a: Architecture) -> tuple[str, str]:
    """Names of the configuration's and the model's class in transformers."""
    return class_of(a)[:2]


def config_keywords(a: Architecture) -> dict[str, Any]:
    """Keywords of the configuration's class. The ids of special tokens are left to the data: generation needs them, training does not."""
    if a.vision is not None:
        return _seeing(a) | {"tie_word_embeddings": a.tie_embeddings}
    fields = say(class_of(a).settings, a) | {"vocab_size": a.vocab_size, "tie_word_embeddings": a.tie_embeddings, "use_cache": False}
    if a.stack == "decoder":
        fields |= {"bos_token_id": None, "eos_token_id": None}
    return fields


MEGATRON_BERT: Final = ("MegatronBertConfig", "MegatronBertForMaskedLM")
"""transformers' classes of a pre-norm BERT, as megatron-core's is; BertForMaskedLM is post-norm."""


def export_fields(a: Architecture) -> dict[str, Any]:
    """The section "export" of engine.json: what the model's config.json in transformers has."""
    config_class, model_class = MEGATRON_BERT if a.stack == "encoder" else model_classes(a)
    ours = ("num_key_value_heads",) if class_of(a) is GPT2 else ()  # asked for by DeepSpeed's Ulysses, unknown to GPT2Config
    keywords = {name: value for name, value in config_keywords(a).items() if name not in ours}
    return {"config_class": config_class, "model_class": model_class, "config": keywords}


PEFT_TASKS: Final = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}
"""peft's name for what a model of this stack does (peft/utils/peft_types.py, TaskType), by which AutoPeftModel finds its class; BERT's
pretraining heads are none of them."""


def lora_fields(a: Architecture, lora: Lora) -> dict[str, Any]:
    """Keywords of peft's LoraConfig, but for the base model's name."""
    names = target_names(a, lora)
    # The linears of a tower have such names too: peft takes a text for a pattern of a module's whole name.
    targets = list(names) if a.vision is None else rf".*language_model\..*\.({'|'.join(names)})"
    task = {"task_type": PEFT_TASKS[a.stack]} if a.stack in PEFT_TASKS else {}
    return task | {"r": lora.rank, "lora_alpha": lora.scaling * lora.rank, "lora_dropout": lora.dropout, "target_modules": targets}


def hf_fields(plan: Plan) -> dict[str, Any]:
    """What `engine.json` says of the model."""
    config_class, model_class = model_classes(plan.model)
    lora = plan.training.lora
    adapters = {} if lora is None else {"lora": lora_fields(plan.model, lora) | {"merge": plan.run.merge_lora}}
    frozen = {"freeze": list(plan.training.freeze)} if plan.training.freeze else {}
    return {
        **adapters,
        **frozen,
        "config_class": config_class,
        "model_class": model_class,
        "config": config_keywords(plan.model),
        "attn_implementation": attention_implementation(plan),
        "dtype": TORCH_DTYPE[plan.training.precision],
        "gradient_checkpointing": plan.strategy.recompute == "full",
        # Above stage 2 no rank ever holds the whole model; AutoTP cuts modules that are whole.
        "zero_init": plan.zero_stage == 3 and plan.tp == 1,
        "ulysses_size": plan.cp,
    }
