"""What is written of a model for transformers is read back as the same model: small models of each class, with no field at its default."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hand_plans import BERT, LLAMA, T5
from msgspec.structs import replace

from orchestrator.engines.hf_config import config_keywords, inexpressible, lora_fields
from orchestrator.model.architecture import Architecture
from orchestrator.model.families import from_hf_config
from orchestrator.model.lora import Lora

DECODER: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 24, "vocab_size": 500, "max_position_embeddings": 1024, "rms_norm_eps": 3e-4, "rope_theta": 30_000,
    "tie_word_embeddings": True, "attention_dropout": 0.2,
}  # fmt: skip
PLAIN = {name: value for name, value in DECODER.items() if name != "head_dim"}
LLAMA3 = {"rope_type": "llama3", "factor": 5.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
EXPERTS = {"num_experts_per_tok": 4, "router_aux_loss_coef": 0.02}
SIGMOID = EXPERTS | {
    "n_routed_experts": 8, "moe_intermediate_size": 48, "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "num_nextn_predict_layers": 0,
}  # fmt: skip
LATENT = {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = PLAIN | LATENT | SIGMOID | {"num_key_value_heads": 6, "rms_norm_eps": 1e-6}
NEMOTRON: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "vocab_size": 500, "intermediate_size": 160,
    "max_position_embeddings": 1024, "layer_norm_epsilon": 3e-4, "hybrid_override_pattern": "ME*EM", "num_hidden_layers": 5,
    "ssm_state_size": 32, "mamba_num_heads": 12, "mamba_head_dim": 16, "n_groups": 4, "conv_kernel": 3, "chunk_size": 32, "expand": 2,
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 96,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2, "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 500, "n_positions": 128, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_inner": 200,
                      "layer_norm_epsilon": 3e-4, "attn_pdrop": 0.2, "resid_pdrop": 0.3, "embd_pdrop": 0.3}),
    "llama": ("llama", DECODER),
    "llama, plain": ("llama", PLAIN | {"tie_word_embeddings": False}),
    "llama, stretched": ("llama", DECODER | {"rope_scaling": LLAMA3}),
    "qwen2": ("qwen2", PLAIN),
    "qwen3": ("qwen3", DECODER),
    "mistral": ("mistral", DECODER | {"sliding_window": 256}),
    "phi3": ("phi3", PLAIN | {"sliding_window": 256, "partial_rotary_factor": 0.75}),
    "olmo2": ("olmo2", PLAIN),
    "gemma3": ("gemma3_text", DECODER | {"sliding_window": 256, "sliding_window_pattern": 3, "query_pre_attn_scalar": 30,
                                         "rope_local_base_freq": 7_000}),
    "mixtral": ("mixtral", DECODER | EXPERTS | {"num_local_experts": 8}),
    "qwen3 of experts": ("qwen3_moe", DECODER | EXPERTS | {"num_experts": 8, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "glm": ("glm4_moe", DECODER | SIGMOID | {"use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.25}),
    "deepseek": ("deepseek_v3", DEEPSEEK),
    "deepseek, stretched": ("deepseek_v3", DEEPSEEK | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "llama4": ("llama4_text", DECODER | {"intermediate_size_mlp": 200, "num_local_experts": 8, "num_experts_per_tok": 1,
                                         "interleave_moe_layer_step": 2, "attention_chunk_size": 64, "attn_scale": 0.2, "floor_scale": 100,
                                         "use_qk_norm": True, "attn_temperature_tuning": True}),
    "mamba2": ("mamba2", {"num_hidden_layers": 3, "hidden_size": 96, "state_size": 32, "num_heads": 12, "head_dim": 16, "n_groups": 4,
                          "conv_kernel": 3, "chunk_size": 32, "expand": 2, "vocab_size": 500, "layer_norm_epsilon": 3e-4,
                          "tie_word_embeddings": True}),
    "nemotron": ("nemotron_h", NEMOTRON),
    "nemotron, one group": ("nemotron_h", NEMOTRON | {"n_group": 1, "topk_group": 1}),
    "deepseek, one group": ("deepseek_v3", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "bert": ("bert", {"vocab_size": 500, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 160,
                      "max_position_embeddings": 128, "type_vocab_size": 3, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2,
                      "layer_norm_eps": 3e-4}),
    "t5": ("t5", {"vocab_size": 500, "d_model": 96, "d_kv": 24, "d_ff": 160, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 6,
                  "dropout_rate": 0.3, "layer_norm_epsilon": 3e-4, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip


def whole(a: Architecture) -> Architecture:
    """With what follows from other fields said."""
    return replace(a, num_query_groups=a.query_groups, kv_channels=a.head_dim)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_read_back_from_what_is_written_of_it(name: str) -> None:
    model_type, config = CONFIGS[name]
    read = from_hf_config(config | {"model_type": model_type}, "x")
    assert inexpressible(read) is None
    again = from_hf_config(config_keywords(read) | {"model_type": model_type}, "x")
    one, other = (msgspec.structs.asdict(whole(found)) for found in (read, again))
    assert {name: (value, other[name]) for name, value in one.items() if other[name] != value} == {}


def test_a_gemmas_layers_with_a_window_have_frequencies_that_are_not_stretched() -> None:
    """Said of one kind of layers: of those with a window, beside others without."""
    model_type, config = CONFIGS["gemma3"]
    read = replace(from_hf_config(config | {"model_type": model_type}, "x"), rope_scaling_factor=8.0, rope_scaling_type="linear")
    assert inexpressible(read) is None

    def stretched(layer: Any) -> Any:
        mixer = layer.mixer
        return replace(layer, mixer=replace(mixer, rotary_scaled=True)) if mixer is not None and mixer.window else layer

    everywhere = replace(read, mixer=stretched(read).mixer, pattern=tuple(map(stretched, read.pattern)))
    assert "scales no rotary frequencies in layers with a window" in (inexpressible(everywhere) or "")


def test_an_adapter_says_what_its_model_does_in_pefts_words() -> None:
    """Its adapter_config.json had "task_type": null, by which peft's AutoPeftModel and servers of adapters choose nothing."""
    peft = pytest.importorskip("peft")
    said = [lora_fields(a, Lora(rank=4)).get("task_type") for a in (LLAMA, T5, BERT)]
    assert said == [peft.TaskType.CAUSAL_LM, peft.TaskType.SEQ_2_SEQ_LM, None]
