"""A plan's model as a configuration of Hugging Face transformers (class, keywords, attention, data type, checkpointing), and why some
models have none there. For engines that train transformers' models, and for weights that go to or come from them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from orchestrator.engines.transformer_config import TORCH_DTYPE
from orchestrator.hardware.spec import Cluster
from orchestrator.model.architecture import Layer
from orchestrator.model.families.decoder import LLAMA3_ROPE
from orchestrator.model.lora import Lora, target_names
from orchestrator.model.parts.attention import GroupedQueryAttention
from orchestrator.model.parts.latent_attention import LatentAttention
from orchestrator.model.parts.mamba2 import Mamba2
from orchestrator.model.parts.mlp import Mlp
from orchestrator.model.parts.nothing import Nothing
from orchestrator.model.spec import Architecture
from orchestrator.model.training import Training
from orchestrator.plan import Plan
from orchestrator.words.megatron import FUNCTION

DEEPSEEK_YARN: Final = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
"""DeepSeek's constants of YaRN, for which `LatentAttention.yarn_mscale` is made."""

FLASH_PRECISIONS: Final = ("bf16", "fp16")
FLASH_COMPUTE_CAPABILITY: Final = 8.0
"""The flash-attn package runs on Ampere and later, in 16 bits."""


def attention_implementation(plan: Plan) -> str:
    """The word by which transformers chooses its attention: flash_attention_2 where the package runs, else torch's own
    scaled_dot_product_attention. T5's relative bias and Llama 4's chunks need the latter, and transformers' models without attention take
    neither word."""
    parts = plan.model.features()
    if not {"attention", "latent_attention"} & {*parts}:
        return "eager"
    if plan.model.stack == "encoder_decoder" or "chunked_attention" in parts:
        return "sdpa"
    return "flash_attention_2" if takes_flash_attention(plan.cluster, plan.training) else "sdpa"


def takes_flash_attention(cluster: Cluster, training: Training) -> bool:
    """Whether the flash-attn package is there, and runs on this GPU in this precision."""
    if cluster.is_cpu or not cluster.software.flash_attention:
        return False
    return training.precision in FLASH_PRECISIONS and float(cluster.gpu.compute_capability) >= FLASH_COMPUTE_CAPABILITY


T5_ACTIVATIONS: Final = {"relu": "relu", "geglu": "gated-gelu"}


def _gpt(a: Architecture) -> dict[str, Any]:
    return {
        "n_layer": a.num_layers,
        "n_embd": a.hidden_size,
        "n_head": a.num_attention_heads,
        # Not transformers' own name: DeepSpeed's Ulysses asks for it.
        "num_key_value_heads": a.num_attention_heads,
        "n_inner": a.ffn_hidden_size,
        "n_positions": a.max_position_embeddings,
        "activation_function": FUNCTION[a.activation],
        "layer_norm_epsilon": a.norm_epsilon,
        "resid_pdrop": a.hidden_dropout,
        "embd_pdrop": a.hidden_dropout,
        "attn_pdrop": a.attention_dropout,
    }


def _rope(a: Architecture) -> dict[str, Any]:
    if a.rope_scaling_factor is None:
        return {"rope_type": "default", "rope_theta": float(a.rotary_base)}
    if a.rope_scaling_type == "linear":
        return {"rope_type": "linear", "rope_theta": float(a.rotary_base), "factor": a.rope_scaling_factor}
    return {"rope_type": "llama3", "rope_theta": float(a.rotary_base), "factor": a.rope_scaling_factor, **LLAMA3_ROPE}


def _sizes(a: Architecture) -> dict[str, Any]:
    """Sizes that transformers' decoders with query groups call by the same names."""
    return {
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.query_groups,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_hidden_size,
        "max_position_embeddings": a.max_position_embeddings,
        "attention_dropout": a.attention_dropout,
    }


def _rotary(a: Architecture) -> dict[str, Any]:
    return _sizes(a) | {
        "num_hidden_layers": a.num_layers,
        "hidden_act": FUNCTION[a.activation],
        "rms_norm_eps": a.norm_epsilon,
        "rope_parameters": _rope(a),
    }


def _llama(a: Architecture) -> dict[str, Any]:
    return _rotary(a) | {"attention_bias": a.add_bias_linear, "mlp_bias": a.add_bias_linear}


def _qwen3(a: Architecture) -> dict[str, Any]:
    return _rotary(a) | {"attention_bias": False}


def window_of(layer: Layer) -> int | None:
    """Tokens that a layer's attention sees; None: all."""
    return layer.mixer.window if isinstance(layer.mixer, GroupedQueryAttention) else None


def _windows(a: Architecture) -> list[int | None]:
    """The window of each layer, in tokens; None: it has none."""
    return [window_of(layer) for layer in a.each_layer()]


def _first_window(a: Architecture) -> int | None:
    """The window of the first layer, and of all where there is one kind, in tokens; None: it has none."""
    return next(map(window_of, a.each_layer()))


def _mistral(a: Architecture) -> dict[str, Any]:
    return _rotary(a) | {"sliding_window": _first_window(a)}


def _phi3(a: Architecture) -> dict[str, Any]:
    return _rotary(a) | {
        "sliding_window": _first_window(a),
        "rope_parameters": _rope(a) | {"partial_rotary_factor": a.rotary_percent},
        "original_max_position_embeddings": a.max_position_embeddings,
        "pad_token_id": None,
    }


def _olmo2(a: Architecture) -> dict[str, Any]:
    return _rotary(a) | {"attention_bias": False, "pad_token_id": None}


def _gemma3(a: Architecture) -> dict[str, Any]:
    layers = [layer.mixer for layer in a.each_layer() if isinstance(layer.mixer, GroupedQueryAttention)]
    local = next((mixer for mixer in layers if mixer.window is not None), layers[0])
    theta = float(local.rotary_base or a.rotary_base)
    keywords = _rotary(a) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["full_attention" if mixer.window is None else "sliding_attention" for mixer in layers],
        "sliding_window": local.window,
        "query_pre_attn_scalar": int(local.score_width or a.head_dim),
        "rope_parameters": {"full_attention": _rope(a), "sliding_attention": {"rope_type": "default", "rope_theta": theta}},
        "attention_bias": False,
        "pad_token_id": None,
    }
    return {name: value for name, value in keywords.items() if name != "hidden_act"}


def _routed(a: Architecture) -> dict[str, Any]:
    """What configurations of models of experts have in common."""
    experts = a.experts[0]
    return _rotary(a) | {"num_experts_per_tok": experts.topk, "router_aux_loss_coef": experts.aux_loss_coeff}


def _mixtral(a: Architecture) -> dict[str, Any]:
    experts = a.experts[0]
    return _routed(a) | {"intermediate_size": experts.ffn_hidden_size, "num_local_experts": experts.num_experts, "sliding_window": None}


def _qwen3_moe(a: Architecture) -> dict[str, Any]:
    experts = a.experts[0]
    return _routed(a) | {
        "num_experts": experts.num_experts,
        "moe_intermediate_size": experts.ffn_hidden_size,
        "norm_topk_prob": experts.normalized,
        "attention_bias": False,
    }


def _sigmoid_routed(a: Architecture) -> dict[str, Any]:
    """The fields of GLM-4.5's and DeepSeek-V3's routed experts."""
    experts = a.experts[0]
    return _routed(a) | {
        "n_routed_experts": experts.num_experts,
        "moe_intermediate_size": experts.ffn_hidden_size,
        "n_shared_experts": experts.shared_ffn_hidden_size // experts.ffn_hidden_size,
        "norm_topk_prob": experts.normalized,
        "routed_scaling_factor": experts.scaling,
        "n_group": experts.groups or 1,
        "topk_group": experts.group_topk or 1,
        "first_k_dense_replace": sum(isinstance(layer.feed_forward, Mlp) for layer in a.each_layer()),
        "attention_bias": a.add_qkv_bias,
        "num_nextn_predict_layers": 0,
    }


def _glm4_moe(a: Architecture) -> dict[str, Any]:
    more = {"use_qk_norm": "qk_norm" in a.features(), "rope_parameters": _rope(a) | {"partial_rotary_factor": a.rotary_percent}}
    return _sigmoid_routed(a) | more


def _latent_rope(a: Architecture, mixer: LatentAttention) -> dict[str, Any]:
    if "latent_yarn" not in mixer.features(a):
        return _rope(a)
    scales = {"mscale": mixer.yarn_mscale, "mscale_all_dim": mixer.yarn_mscale_all_dim or 0.0}
    return {"rope_type": "yarn", "rope_theta": float(a.rotary_base), "factor": a.rope_scaling_factor, **DEEPSEEK_YARN, **scales}


def _deepseek_v3(a: Architecture) -> dict[str, Any]:
    mixer = next(layer.mixer for layer in a.each_layer())
    assert isinstance(mixer, LatentAttention)
    keywords = _sigmoid_routed(a) | {
        "rope_parameters": _latent_rope(a, mixer),
        "num_key_value_heads": a.num_attention_heads,
        "q_lora_rank": mixer.q_lora_rank,
        "kv_lora_rank": mixer.kv_lora_rank,
        "qk_nope_head_dim": mixer.qk_head_dim,
        "qk_rope_head_dim": mixer.qk_rope_head_dim,
        "v_head_dim": mixer.v_head_dim,
    }
    return {name: value for name, value in keywords.items() if name != "head_dim"}


def _llama4(a: Architecture) -> dict[str, Any]:
    """The fields of Llama 4's text model; a prediction of its kind has what its own experts have, and as wide a shared one."""
    experts, layers = a.experts[0], list(a.each_layer())
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, GroupedQueryAttention)]
    scale, floor = next((mixer.temperature for mixer in mixers if mixer.temperature is not None), (0.1, 8192.0))
    return _rotary(a) | {
        "intermediate_size": experts.ffn_hidden_size,
        "intermediate_size_mlp": a.ffn_hidden_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.topk,
        "moe_layers": [index for index, layer in enumerate(layers) if not isinstance(layer.feed_forward, Mlp)],
        "no_rope_layers": [int(mixer.rotary) for mixer in mixers],
        "attention_chunk_size": next((mixer.chunk for mixer in mixers if mixer.chunk is not None), None),
        "use_qk_norm": any(mixer.qk_norm == "l2" for mixer in mixers),
        "attn_temperature_tuning": any(mixer.temperature is not None for mixer in mixers),
        "attn_scale": scale,
        "floor_scale": int(floor),
        "router_aux_loss_coef": 0.0,
        "attention_bias": False,
        "pad_token_id": None,
    }


def _mamba2(a: Architecture) -> dict[str, Any]:
    mixer = a.common_layer.mixer
    assert isinstance(mixer, Mamba2)
    return {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_heads": mixer.num_heads,
        "head_dim": mixer.head_dim,
        "expand": mixer.inner_size // a.hidden_size,
        "state_size": mixer.state_size,
        "n_groups": mixer.num_groups,
        "conv_kernel": mixer.conv_kernel,
        "use_conv_bias": mixer.conv_bias,
        "chunk_size": mixer.chunk_size,
        "layer_norm_epsilon": a.norm_epsilon,
        "pad_token_id": None,
    }


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


def _nemotron_h(a: Architecture) -> dict[str, Any]:
    mamba = next(layer.mixer for layer in a.each_layer() if isinstance(layer.mixer, Mamba2))
    keywords: dict[str, Any] = _sizes(a) | {
        "layers_block_type": _kinds(a),
        "mamba_num_heads": mamba.num_heads,
        "mamba_head_dim": mamba.head_dim,
        "ssm_state_size": mamba.state_size,
        "n_groups": mamba.num_groups,
        "conv_kernel": mamba.conv_kernel,
        "use_conv_bias": mamba.conv_bias,
        "chunk_size": mamba.chunk_size,
        "layer_norm_epsilon": a.norm_epsilon,
        "pad_token_id": None,
    }
    for experts in a.experts:
        keywords |= {
            "n_routed_experts": experts.num_experts,
            "num_experts_per_tok": experts.topk,
            "moe_intermediate_size": experts.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
            "norm_topk_prob": experts.normalized,
            "routed_scaling_factor": experts.scaling,
            "n_group": experts.groups or 1,
            "topk_group": experts.group_topk or 1,
        }
    return keywords


def _bert(a: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "intermediate_size": a.ffn_hidden_size,
        "max_position_embeddings": a.max_position_embeddings,
        "type_vocab_size": max(1, a.num_token_types),
        "hidden_act": FUNCTION[a.activation],
        "layer_norm_eps": a.norm_epsilon,
        "hidden_dropout_prob": a.hidden_dropout,
        "attention_probs_dropout_prob": a.attention_dropout,
        # Its embedding would neither learn nor be counted in the norm.
        "pad_token_id": None,
    }


def _t5(a: Architecture) -> dict[str, Any]:
    return {
        "num_layers": a.num_layers,
        "num_decoder_layers": a.decoder_num_layers,
        "d_model": a.hidden_size,
        "num_heads": a.num_attention_heads,
        "d_kv": a.head_dim,
        "d_ff": a.ffn_hidden_size,
        "n_positions": a.max_position_embeddings,
        "feed_forward_proj": T5_ACTIVATIONS[a.activation],
        "layer_norm_epsilon": a.norm_epsilon,
        "dropout_rate": a.hidden_dropout,
    }


Keywords = Callable[[Architecture], dict[str, Any]]
Lacks = Callable[[Architecture, str], Iterator[str]]


class HfClass(NamedTuple):
    """A model class of transformers, named with its configuration's; the keywords of that, and what it is made of. `parts`: in the words of
    `Architecture.features`. `lacks`: complaints that no table says."""

    config: str
    model: str
    keywords: Keywords
    activations: tuple[str, ...]
    normalization: str
    position_embedding: str
    parts: tuple[str, ...]
    lacks: Lacks


def _no_groups(a: Architecture, name: str) -> Iterator[str]:
    if a.query_groups != a.num_attention_heads:
        yield f"num_query_groups={a.query_groups}: transformers' {name} has no grouped queries"


def _biases_everywhere(a: Architecture, name: str) -> Iterator[str]:
    if not a.add_bias_linear:
        yield f"add_bias_linear=false: the linears of transformers' {name} have biases"
    if a.head_dim * a.num_attention_heads != a.hidden_size:
        yield f"kv_channels={a.head_dim}: transformers' {name} has heads of hidden_size/num_attention_heads"
    yield from _no_groups(a, name)


def _one_dropout(a: Architecture, name: str) -> Iterator[str]:
    if a.add_bias_linear:
        yield f"add_bias_linear=true: the linears of transformers' {name} have no biases"
    yield from _no_groups(a, name)
    if a.hidden_dropout != a.attention_dropout:
        yield f"hidden_dropout={a.hidden_dropout} attention_dropout={a.attention_dropout}: transformers' {name} has one dropout rate"


def _attention_dropout_only(a: Architecture, name: str) -> Iterator[str]:
    if a.hidden_dropout:
        yield f"hidden_dropout={a.hidden_dropout}: transformers' {name} has attention dropout only"


def _biases(a: Architecture) -> str:
    return f"add_bias_linear={a.add_bias_linear} add_qkv_bias={a.add_qkv_bias}".lower()


def _qkv_bias(a: Architecture, name: str) -> Iterator[str]:
    if not a.add_qkv_bias or a.add_bias_linear:
        yield f"{_biases(a)}: transformers' {name} has biases on Q, K and V only"
    yield from _attention_dropout_only(a, name)


def _llama_biases(a: Architecture, name: str) -> Iterator[str]:
    if a.add_qkv_bias and not a.add_bias_linear:
        yield f"add_qkv_bias=true: transformers' {name} has biases on all linears or none"
    yield from _attention_dropout_only(a, name)


def _head_norms(a: Architecture, name: str) -> Iterator[str]:
    if "qk_norm" not in a.features():
        yield f"qk_norm=null: transformers' {name} norms queries and keys"
    if a.add_bias_linear or a.add_qkv_bias:
        yield f"{_biases(a)}: our {name} has no biases"
    yield from _attention_dropout_only(a, name)


def _bare_linears(a: Architecture, name: str) -> Iterator[str]:
    """Why classes without any bias can't be this model; nothing where they can."""
    if a.add_bias_linear or a.add_qkv_bias:
        yield f"{_biases(a)}: transformers' {name} has no biases"


def _one_window(a: Architecture, name: str) -> Iterator[str]:
    if len(set(_windows(a))) > 1:
        yield f"pattern: transformers' {name} has the same window in all layers"
    yield from _bare_linears(a, name)
    yield from _attention_dropout_only(a, name)


def _with(*words: str) -> Lacks:
    """Complaints of a class that has these parts always, no biases, and no dropout but attention's."""

    def lacks(a: Architecture, name: str) -> Iterator[str]:
        yield from (f"transformers' {name} is not without {word}" for word in words if word not in a.features())
        yield from _bare_linears(a, name)
        yield from _attention_dropout_only(a, name)

    return lacks


def _gemma_layers(a: Architecture, name: str) -> Iterator[str]:
    yield from _with("qk_norm", *GEMMA)(a, name)
    layers = [layer.mixer for layer in a.kinds_of_layers() if isinstance(layer.mixer, GroupedQueryAttention)]
    if not any(mixer.window for mixer in layers):
        yield f"pattern: transformers' {name} has windows in some layers"
    if any(mixer.window and (mixer.rotary_scaled and a.rope_scaling_factor is not None) for mixer in layers):
        yield f"rotary_scaled=true: transformers' {name} scales no rotary frequencies in layers with a window"
    if any(not mixer.window and mixer.rotary_base not in (None, a.rotary_base) for mixer in layers) or len(layers) > 2:
        yield f"pattern: transformers' {name} has two kinds of layers, of which those with a window have rotary frequencies of their own"
    if len({mixer.score_width for mixer in layers}) > 1:
        yield f"score_width: transformers' {name} has one for all layers"
    for width in sorted({mixer.score_width for mixer in layers if mixer.score_width is not None and mixer.score_width % 1}):
        yield f"score_width={width}: transformers' {name} takes an integer"


GEMMA: Final = ("sandwich_norm", "zero_centered_norm", "embedding_scale")


def _plain_experts(a: Architecture, name: str) -> Iterator[str]:
    """Why Mixtral and Qwen3-MoE can't have these experts; nothing where they can."""
    if a.experts[0].scaling != 1.0:
        yield f"experts.scaling={a.experts[0].scaling}: transformers' {name} does not scale scores"


def _mixtral_experts(a: Architecture, name: str) -> Iterator[str]:
    if not a.experts[0].normalized:
        yield f"experts.normalized=false: transformers' {name} makes scores sum to one"
    yield from _plain_experts(a, name)
    yield from _bare_linears(a, name)
    yield from _attention_dropout_only(a, name)


def _qwen3_experts(a: Architecture, name: str) -> Iterator[str]:
    yield from _plain_experts(a, name)
    yield from _head_norms(a, name)


def _sigmoid_experts(a: Architecture, name: str) -> Iterator[str]:
    """Why GLM-4.5, and DeepSeek-V3, whose router it has, can't have these experts; nothing where they can."""
    experts = a.experts[0]
    if experts.score != "sigmoid" or not experts.expert_bias:
        yield f"experts.score={experts.score}: transformers' {name} has sigmoids with a bias"
    if not experts.shared_ffn_hidden_size or experts.shared_ffn_hidden_size % experts.ffn_hidden_size:
        yield f"shared_ffn_hidden_size={experts.shared_ffn_hidden_size}: transformers' {name} has shared experts as wide as the others"
    if experts.group_topk and experts.topk != GROUP_SCORES * experts.group_topk:
        # megatron-core sums the best topk/group_topk (moe_utils.py, group_limited_topk).
        yield f"experts.topk={experts.topk}: transformers' {name} values a group by its {GROUP_SCORES} best experts"
    dense = [isinstance(layer.feed_forward, Mlp) for layer in a.each_layer()]
    if dense != sorted(dense, reverse=True):
        yield f"pattern: transformers' {name} has dense layers before those with experts only"
    if a.add_bias_linear:
        yield f"add_bias_linear=true: transformers' {name} has no biases but of Q, K and V"
    yield from _attention_dropout_only(a, name)


def _latent_experts(a: Architecture, name: str) -> Iterator[str]:
    if a.norm_epsilon != LATENT_EPSILON:
        yield f"norm_epsilon={a.norm_epsilon}: transformers' {name} has {LATENT_EPSILON} in the norms of latent vectors"
    yield from _sigmoid_experts(a, name)


def _llama4_layers(a: Architecture, name: str) -> Iterator[str]:
    """Why Llama 4 can't have these layers; nothing where they are of one kind with rotary positions and one without, and experts have a
    shared one of their own width."""
    yield from _with("scores_on_input", "shared_experts")(a, name)
    experts = a.experts[0]
    if experts.score != "sigmoid" or experts.normalized or experts.scaling != 1.0 or experts.expert_bias:
        yield f"experts.score={experts.score}: transformers' {name} has sigmoids as they are"
    if experts.shared_ffn_hidden_size != experts.ffn_hidden_size:
        yield f"shared_ffn_hidden_size={experts.shared_ffn_hidden_size}: transformers' {name} has a shared expert as wide as the others"
    mixers = [layer.mixer for layer in a.kinds_of_layers() if isinstance(layer.mixer, GroupedQueryAttention)]
    for rotary, without in ((True, "true, without temperature"), (False, "false, without chunk and qk_norm")):
        kinds = {(m.chunk, m.qk_norm, m.temperature) for m in mixers if m.rotary is rotary}
        wrong = any((temperature if rotary else chunk or norm) is not None for chunk, norm, temperature in kinds)
        if wrong or len(kinds) > 1:
            yield f"pattern: transformers' {name} has one kind of layers with rotary={without}"


def _single_parts(a: Architecture, name: str) -> Iterator[str]:
    """Why Nemotron-H can't have these layers; nothing where they are of one part, with plain attention."""
    yield from _with("single_part_layers", "mamba2")(a, name)
    if None in _kinds(a):
        yield f"pattern: transformers' {name} has layers of one part"
    if len({layer.mixer for layer in a.each_layer() if isinstance(layer.mixer, Mamba2)}) > 1 or len(a.experts) > 1:
        yield f"pattern: transformers' {name} has one size of state space, and one of experts"
    if any(isinstance(layer.feed_forward, Mlp) and layer.feed_forward.ffn_hidden_size for layer in a.each_layer()):
        yield f"mlp.ffn_hidden_size: transformers' {name} has one for all layers"
    for experts in a.experts:
        if experts.score != "sigmoid" or not experts.expert_bias or not experts.shared_ffn_hidden_size:
            yield f"experts.score={experts.score}: transformers' {name} has sigmoids with a bias, and a shared expert"


def _only_mamba(a: Architecture, name: str) -> Iterator[str]:
    mixers = {layer.mixer for layer in a.each_layer()}
    mixer = next(iter(mixers))
    if not isinstance(mixer, Mamba2) or len(mixers) > 1 or any(not isinstance(each.feed_forward, Nothing) for each in a.each_layer()):
        yield f"pattern: transformers' {name} has nothing but layers of one Mamba-2"
    elif mixer.inner_size % a.hidden_size:
        yield f"hidden_size={a.hidden_size}: transformers' {name} has {mixer.inner_size} channels, a multiple of it"
    yield from _with("single_part_layers", "mamba2")(a, name)


LATENT_EPSILON: Final = 1e-6
"""Epsilon of the norms of latent vectors: DeepseekV3RMSNorm's default, with which DeepseekV3Attention makes them."""
GROUP_SCORES: Final = 2
"""Experts by whose scores DeepSeek-V3's router values a group (modeling_deepseek_v3.py, route_tokens_to_experts)."""
ROTARY: Final = ("attention", "mlp", "llama3_rope")
ROUTED: Final = ("attention", "experts", "llama3_rope")
SIGMOID: Final = ("mlp", "shared_experts", "sigmoid_router", "grouped_router", "expert_bias")
GLU: Final = ("swiglu", "geglu")


def _decoder(
    name: str, keywords: Keywords, parts: Sequence[str], lacks: Lacks, *activations: str, position: str = "rope", config: str = "Config"
) -> HfClass:
    """A decoder with RMSNorm, and with SwiGLU where no other activation is said; by its class's name without its ending."""
    return HfClass(name + config, f"{name}ForCausalLM", keywords, activations or ("swiglu",), "RMSNorm", position, tuple(parts), lacks)


GPT2: Final = HfClass(
    *("GPT2Config", "GPT2LMHeadModel", _gpt, ("gelu", "relu"), "LayerNorm", "learned_absolute", ("attention", "mlp"), _biases_everywhere)
)
LLAMA: Final = _decoder("Llama", _llama, ROTARY, _llama_biases, *GLU)
QWEN2: Final = _decoder("Qwen2", _rotary, ROTARY, _qkv_bias, *GLU)
QWEN3: Final = _decoder("Qwen3", _qwen3, (*ROTARY, "qk_norm"), _head_norms, *GLU)
MIXTRAL: Final = _decoder("Mixtral", _mixtral, ROUTED, _mixtral_experts)
QWEN3_MOE: Final = _decoder("Qwen3Moe", _qwen3_moe, (*ROUTED, "qk_norm"), _qwen3_experts)
GLM4_MOE: Final = _decoder("Glm4Moe", _glm4_moe, (*ROUTED, *SIGMOID, "qk_norm", "partial_rotary"), _sigmoid_experts)
DEEPSEEK_V3: Final = _decoder("DeepseekV3", _deepseek_v3, ("latent_attention", "latent_yarn", "experts", *SIGMOID), _latent_experts)
MISTRAL: Final = _decoder("Mistral", _mistral, (*ROTARY, "window"), _one_window)
PHI3: Final = _decoder("Phi3", _phi3, ("attention", "mlp", "window", "partial_rotary"), _one_window)
OLMO2: Final = _decoder("Olmo2", _olmo2, ("attention", "mlp", "qk_norm_hidden", "post_norm"), _with("qk_norm_hidden", "post_norm"))
GEMMA3_PARTS: Final = ("attention", "mlp", "window", "qk_norm", "mixed_rope", "linear_rope", "score_width", *GEMMA)
GEMMA3: Final = _decoder("Gemma3", _gemma3, GEMMA3_PARTS, _gemma_layers, "geglu", config="TextConfig")
LLAMA4_ROUTER: Final = ("mlp", "shared_experts", "sigmoid_router", "scores_on_input")
LLAMA4_PARTS: Final = (*ROUTED, *LLAMA4_ROUTER, "qk_l2_norm", "chunked_attention", "query_temperature", "no_rope_layers")
LLAMA4: Final = _decoder("Llama4", _llama4, LLAMA4_PARTS, _llama4_layers, config="TextConfig")
MAMBA2: Final = _decoder("Mamba2", _mamba2, ("mamba2", "single_part_layers"), _only_mamba, position="none")
NEMOTRON_PARTS: Final = ("mamba2", "single_part_layers", "attention", "experts", *SIGMOID)
NEMOTRON_H: Final = _decoder("NemotronH", _nemotron_h, NEMOTRON_PARTS, _single_parts, "relu2", position="none")
DENSE: Final = (GPT2, LLAMA, QWEN2, QWEN3, MISTRAL, PHI3, OLMO2, GEMMA3, MAMBA2, NEMOTRON_H)
OF_FAMILY: Final = {"phi3": PHI3}
"""The class of a family that another class could compute as well, where its checkpoints have other names."""
WITH_EXPERTS: Final = (MIXTRAL, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3, LLAMA4, NEMOTRON_H)
"""The first that has all of a model is its class. One more class is a line here, and its keywords."""
BERT: Final = HfClass(
    *("BertConfig", "BertForMaskedLM", _bert, ("gelu", "relu"), "LayerNorm", "learned_absolute"),
    *(("attention", "mlp", "encoder"), _biases_everywhere),
)
T5: Final = HfClass(
    *("T5Config", "T5ForConditionalGeneration", _t5, ("relu", "geglu"), "RMSNorm", "relative"),
    *(("attention", "mlp", "encoder_decoder", "relative_bias"), _one_dropout),
)
PARTS: Final = tuple(dict.fromkeys(word for found in (*DENSE, *WITH_EXPERTS, BERT, T5) for word in found.parts))
"""What transformers' classes have between them: those that DeepSpeed trains here."""


def _complaints(a: Architecture, found: HfClass) -> list[str]:
    """Why this is not the model's class."""
    name = found.model
    given = (
        ("activation", a.activation, found.activations),
        ("normalization", a.normalization, (found.normalization,)),
        ("position_embedding", a.position_embedding, (found.position_embedding,)),
    )
    said = [f"{key}={value}: transformers' {name} has {', '.join(offered)}" for key, value, offered in given if value not in offered]
    if a.rope_scaling_factor is not None and found.position_embedding != "rope":
        said.append(f"rope_scaling_factor={a.rope_scaling_factor}: transformers' {name} has no rotary positions")
    lacking = [word for word in a.features() if word not in found.parts and not (word.endswith("_rope") and said)]
    return [*said, *(f"transformers' {name} has no {word}" for word in lacking), *found.lacks(a, name)]


def class_of(a: Architecture) -> HfClass:
    """The first class that has all of this model, or the one with the fewest reasons against it."""
    candidates = {"decoder": WITH_EXPERTS if a.experts else DENSE, "encoder": (BERT,), "encoder_decoder": (T5,)}[a.stack]
    return min(candidates, key=lambda found: (len(_complaints(a, found)), found is not OF_FAMILY.get(a.family, found)))


def inexpressible(a: Architecture) -> str | None:
    """Why transformers has no class for this architecture; None: it has."""
    return next(iter(_complaints(a, class_of(a))), None)


def model_classes(a: Architecture) -> tuple[str, str]:
    """Names of the configuration's and the model's class in transformers."""
    return class_of(a)[:2]


def config_keywords(a: Architecture) -> dict[str, Any]:
    """Keywords of the configuration's class. The ids of special tokens are left to the data: generation needs them, training does not."""
    fields = class_of(a).keywords(a) | {"vocab_size": a.vocab_size, "tie_word_embeddings": a.tie_embeddings, "use_cache": False}
    if a.stack == "decoder":
        fields |= {"bos_token_id": None, "eos_token_id": None}
    return fields


def lora_fields(a: Architecture, lora: Lora) -> dict[str, Any]:
    """Keywords of peft's LoraConfig, but for the base model's name."""
    targets = list(target_names(a, lora))
    return {"r": lora.rank, "lora_alpha": lora.scaling * lora.rank, "lora_dropout": lora.dropout, "target_modules": targets}


def hf_fields(plan: Plan) -> dict[str, Any]:
    """What `engine.json` says of the model."""
    config_class, model_class = model_classes(plan.model)
    lora = plan.training.lora
    adapters = {} if lora is None else {"lora": lora_fields(plan.model, lora) | {"merge": plan.run.merge_lora}}
    return adapters | {
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
