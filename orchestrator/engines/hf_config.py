"""A plan's model as a Hugging Face configuration: class, keywords, attention, data type, checkpointing; and what it can't express."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.engines.transformer_config import TORCH_DTYPE
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan

MODEL_CLASS: Final = {
    "gpt": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
}
QWEN2: Final = ("Qwen2Config", "Qwen2ForCausalLM")
"""A llama with biases on queries, keys and values only."""

LLAMA3_SCALING: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""As megatron-core fixes them (rotary_pos_embedding.py, _apply_scaling)."""

FLASH_PRECISIONS: Final = ("bf16", "fp16")
FLASH_COMPUTE_CAPABILITY: Final = 8.0
"""The flash-attn package runs on Ampere and later, in 16 bits."""

ACTIVATIONS: Final[dict[str, dict[str, str]]] = {
    "gpt": {"gelu": "gelu", "relu": "relu"},
    "llama": {"swiglu": "silu", "geglu": "gelu"},
    "bert": {"gelu": "gelu", "relu": "relu"},
    "t5": {"relu": "relu", "geglu": "gated-gelu"},
}
NORMALIZATION: Final = {"gpt": "LayerNorm", "llama": "RMSNorm", "bert": "LayerNorm", "t5": "RMSNorm"}
POSITIONS: Final = {"gpt": "learned_absolute", "llama": "rope", "bert": "learned_absolute", "t5": "relative"}


def inexpressible(a: Architecture) -> str | None:
    """Why transformers has no class for this architecture; None: it has."""
    if a.family not in MODEL_CLASS:
        return f"family={a.family}: {', '.join(MODEL_CLASS)}"
    given = (
        ("activation", a.activation, tuple(ACTIVATIONS[a.family])),
        ("normalization", a.normalization, (NORMALIZATION[a.family],)),
        ("position_embedding", a.position_embedding, (POSITIONS[a.family],)),
    )
    for name, value, offered in given:
        if value not in offered:
            return f"{name}={value}: transformers' {MODEL_CLASS[a.family][1]} has {', '.join(offered)}"
    name = MODEL_CLASS[a.family][1]
    if a.family in ("gpt", "bert"):
        if not a.add_bias_linear:
            return f"add_bias_linear=false: the linears of transformers' {name} have biases"
        if a.head_dim * a.num_attention_heads != a.hidden_size:
            return f"kv_channels={a.head_dim}: transformers' {name} has heads of hidden_size/num_attention_heads"
    if a.family == "t5" and a.add_bias_linear:
        return f"add_bias_linear=true: the linears of transformers' {name} have no biases"
    if a.family != "llama" and a.query_groups != a.num_attention_heads:
        return f"num_query_groups={a.query_groups}: transformers' {name} has no grouped queries"
    if a.family == "llama" and a.hidden_dropout:
        return f"hidden_dropout={a.hidden_dropout}: transformers' {name} has attention dropout only"
    if a.family == "t5" and a.hidden_dropout != a.attention_dropout:
        return f"hidden_dropout={a.hidden_dropout} attention_dropout={a.attention_dropout}: transformers' {name} has one dropout rate"
    if a.family != "llama" and a.rope_scaling_factor is not None:
        return f"rope_scaling_factor={a.rope_scaling_factor}: transformers' {name} has no rotary positions"
    return None


def attention_implementation(plan: Plan) -> str:
    """flash_attention_2 where the package runs, else torch's own scaled_dot_product_attention. T5's relative bias needs the latter."""
    gpu, software = plan.cluster.gpu, plan.cluster.software
    if plan.cluster.is_cpu or not software.flash_attention or plan.model.family == "t5":
        return "sdpa"
    fits = plan.training.precision in FLASH_PRECISIONS and float(gpu.compute_capability) >= FLASH_COMPUTE_CAPABILITY
    return "flash_attention_2" if fits else "sdpa"


def _gpt(a: Architecture) -> dict[str, Any]:
    return {
        "n_layer": a.num_layers,
        "n_embd": a.hidden_size,
        "n_head": a.num_attention_heads,
        # Not transformers' own name: DeepSpeed's Ulysses asks for it.
        "num_key_value_heads": a.num_attention_heads,
        "n_inner": a.ffn_hidden_size,
        "n_positions": a.max_position_embeddings,
        "activation_function": ACTIVATIONS["gpt"][a.activation],
        "layer_norm_epsilon": a.norm_epsilon,
        "resid_pdrop": a.hidden_dropout,
        "embd_pdrop": a.hidden_dropout,
        "attn_pdrop": a.attention_dropout,
    }


def _rope(a: Architecture) -> dict[str, Any]:
    if a.rope_scaling_factor is None:
        return {"rope_type": "default", "rope_theta": float(a.rotary_base)}
    return {"rope_type": "llama3", "rope_theta": float(a.rotary_base), "factor": a.rope_scaling_factor, **LLAMA3_SCALING}


def _llama(a: Architecture) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.query_groups,
        "head_dim": a.head_dim,
        "intermediate_size": a.ffn_hidden_size,
        "max_position_embeddings": a.max_position_embeddings,
        "hidden_act": ACTIVATIONS["llama"][a.activation],
        "rms_norm_eps": a.norm_epsilon,
        "rope_parameters": _rope(a),
        "attention_dropout": a.attention_dropout,
    }
    if not is_qwen2(a):
        fields |= {"attention_bias": a.add_bias_linear, "mlp_bias": a.add_bias_linear}
    return fields


def _bert(a: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "intermediate_size": a.ffn_hidden_size,
        "max_position_embeddings": a.max_position_embeddings,
        "type_vocab_size": max(1, a.num_token_types),
        "hidden_act": ACTIVATIONS["bert"][a.activation],
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
        "feed_forward_proj": ACTIVATIONS["t5"][a.activation],
        "layer_norm_epsilon": a.norm_epsilon,
        "dropout_rate": a.hidden_dropout,
    }


KEYWORDS: Final = {"gpt": _gpt, "llama": _llama, "bert": _bert, "t5": _t5}


def is_qwen2(a: Architecture) -> bool:
    return a.family == "llama" and a.add_qkv_bias and not a.add_bias_linear


def model_classes(a: Architecture) -> tuple[str, str]:
    """Names of the configuration's and the model's class in transformers."""
    return QWEN2 if is_qwen2(a) else MODEL_CLASS[a.family]


def config_keywords(a: Architecture) -> dict[str, Any]:
    """Keywords of the configuration's class. The ids of special tokens are left to the data: generation needs them, training does not."""
    fields = KEYWORDS[a.family](a) | {"vocab_size": a.vocab_size, "tie_word_embeddings": a.tie_embeddings, "use_cache": False}
    if a.family in ("gpt", "llama"):
        fields |= {"bos_token_id": None, "eos_token_id": None}
    return fields


def hf_fields(plan: Plan) -> dict[str, Any]:
    """What `engine.json` says of the model."""
    config_class, model_class = model_classes(plan.model)
    return {
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
