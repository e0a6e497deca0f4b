"""Weights of Hugging Face checkpoints in any layout: the same logits before, after training, and back in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from worker_plans import make_plan
from worker_pool import Pool

from orchestrator.errors import InputError
from orchestrator.model.families import from_hf_config
from orchestrator.model.spec import Architecture
from orchestrator.plan import Plan, RunSettings, to_json
from orchestrator.workers import hf_files

pytestmark = pytest.mark.engines

TOLERANCE = 1e-4
DEEPSPEED = "megatron_deepspeed"
ALONE = "deepspeed"
SP = {"tp": 2, "sequence_parallel": True}
VOCAB = 259
"""Padded by megatron-core at every tp."""

GPT2: dict[str, Any] = {"n_layer": 4, "n_embd": 32, "n_head": 4, "n_inner": 64, "n_positions": 32, "activation_function": "gelu"}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
BERT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
T5: dict[str, Any] = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 64,
    "n_positions": 32,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
MIXTRAL = LLAMA | {"num_local_experts": 4, "intermediate_size": 40, "sliding_window": None, "router_aux_loss_coef": 0.01}
QWEN3_MOE = LLAMA | {
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
GLM: dict[str, Any] = LLAMA | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
    "router_aux_loss_coef": 0.01,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
}
"""As GLM-4.5, and the router's groups of DeepSeek-V3."""
DEEPSEEK: dict[str, Any] = {name: value for name, value in GLM.items() if name not in ("use_qk_norm", "attention_bias")} | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_shared_experts": 2,
}
STRETCHED = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 40.0, "original_max_position_embeddings": 4096}
YARN = STRETCHED | {"mscale": 1.0, "mscale_all_dim": 0.7}
"""A base so small that frequencies of few positions are stretched, too."""
LAYER_TYPES = [*["sliding_attention"] * 3, "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT2 | NO_DROPOUT),
    "gpt2 tanh": (transformers.GPT2Config, transformers.GPT2LMHeadModel, GPT2 | NO_DROPOUT | {"activation_function": "gelu_new"}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA),
    "llama tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM, LLAMA | {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, LLAMA),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, LLAMA | {"head_dim": 12}),
    "qwen3 of 260 words": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, LLAMA | {"head_dim": 12, "vocab_size": 260}),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, MIXTRAL),
    "qwen3 moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, QWEN3_MOE),
    "qwen3 moe raw scores": (
        *(transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        QWEN3_MOE | {"norm_topk_prob": False},
    ),
    "glm": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM, GLM),
    "deepseek": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, DEEPSEEK),
    "deepseek yarn": (
        *(transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        DEEPSEEK | {"max_position_embeddings": 8192, "rope_parameters": YARN},
    ),
    "deepseek plain queries": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, DEEPSEEK | {"q_lora_rank": None}),
    "phi3": (
        *(transformers.Phi3Config, transformers.Phi3ForCausalLM),
        LLAMA | {"original_max_position_embeddings": 32, "rope_parameters": ROPE},
    ),
    "gemma3": (
        *(transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        LLAMA | {"head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 20, "layer_types": LAYER_TYPES},
    ),
    "post-norm bert": (transformers.BertConfig, transformers.BertForMaskedLM, BERT),
    "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration, T5),
    "t5 gated": (transformers.T5Config, transformers.T5ForConditionalGeneration, T5 | {"feed_forward_proj": "gated-gelu"}),
    "bert": (transformers.MegatronBertConfig, transformers.MegatronBertForMaskedLM, BERT),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "megatron tp2": ("gpt2", {"tp": 2}),
    "megatron pp2 vpp2 tied": ("gpt2 tanh", {"pp": 2, "vpp": 2}),
    "deepspeed tp2 zero1": ("gpt2", {"engine": DEEPSPEED, "tp": 2, "zero_stage": 1}),
    "deepspeed dp2 zero3": ("gpt2", {"engine": DEEPSPEED, "dp": 2, "zero_stage": 3}),
    "megatron tp2 pp2 dp2 zero1": ("llama", {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1, "split": [[3], [1]]}),
    "megatron more ranks than groups": ("llama tied", {"tp": 4}),
    "deepspeed tp2 dp2 zero3": ("llama", {"engine": DEEPSPEED, "tp": 2, "dp": 2, "zero_stage": 3}),
    "deepspeed pp2 zero1": ("llama", {"engine": DEEPSPEED, "pp": 2, "zero_stage": 1}),
    "qwen2 tp2": ("qwen2", {"tp": 2}),
    "qwen3 tp2 pp2": ("qwen3", {"tp": 2, "pp": 2}),
    "deepspeed qwen3 tp2 zero3": ("qwen3", {"engine": DEEPSPEED, "tp": 2, "zero_stage": 3}),
    "deepspeed alone qwen3 tp2 dp2 zero1": ("qwen3 of 260 words", {"engine": ALONE, "tp": 2, "dp": 2, "zero_stage": 1}),
    "mixtral dp2 ep2": ("mixtral", {"dp": 2, "ep": 2}),
    "mixtral tp2 dp2 ep2 etp2": ("mixtral", {**SP, "dp": 2, "ep": 2, "etp": 2}),
    "mixtral pp2 dp2 ep2 zero1": ("mixtral", {"pp": 2, "dp": 2, "ep": 2, "zero_stage": 1}),
    "qwen3 moe tp2 ep2": ("qwen3 moe", {**SP, "ep": 2}),
    "qwen3 moe tp2 pp2 dp2 ep4 zero1": ("qwen3 moe", {**SP, "pp": 2, "dp": 2, "ep": 4, "zero_stage": 1}),
    "qwen3 moe raw scores etp2": ("qwen3 moe raw scores", {"dp": 2, "etp": 2}),
    "glm one rank": ("glm", {}),
    "glm tp2 uneven pp2 dp2 ep2 zero1": ("glm", {**SP, "pp": 2, "split": [[1], [3]], "dp": 2, "ep": 2, "zero_stage": 1}),
    "deepseek tp2 pp2 dp2 ep2 zero1": ("deepseek", {**SP, "pp": 2, "dp": 2, "ep": 2, "zero_stage": 1}),
    "deepseek yarn tp2 dp2 ep2": ("deepseek yarn", {**SP, "dp": 2, "ep": 2}),
    "deepseek plain queries tp2 ep2": ("deepseek plain queries", {**SP, "ep": 2}),
    "deepspeed alone mixtral dp2 ep2 zero1": ("mixtral", {"engine": ALONE, "dp": 2, "ep": 2, "zero_stage": 1}),
    "deepspeed alone qwen3 moe dp4 ep2 zero3": ("qwen3 moe", {"engine": ALONE, "dp": 4, "ep": 2, "zero_stage": 3}),
    "deepspeed alone deepseek yarn dp2 ep2 zero3": ("deepseek yarn", {"engine": ALONE, "dp": 2, "ep": 2, "zero_stage": 3}),
    "deepspeed alone glm dp2 zero3": ("glm", {"engine": ALONE, "dp": 2, "zero_stage": 3}),
    "deepspeed alone mixtral zero0": ("mixtral", {"engine": ALONE}),
    "phi3 tp2 pp2": ("phi3", {"tp": 2, "pp": 2}),
    "deepspeed phi3 pp2 dp2 zero1": ("phi3", {"engine": DEEPSPEED, "pp": 2, "dp": 2, "zero_stage": 1}),
    "deepspeed alone gemma3 dp2 zero3": ("gemma3", {"engine": ALONE, "dp": 2, "zero_stage": 3}),
    "deepspeed alone phi3 dp2 zero1": ("phi3", {"engine": ALONE, "dp": 2, "zero_stage": 1}),
    "bert tp2 pp2": ("bert", {"tp": 2, "pp": 2}),
    "deepspeed alone gpt dp2 zero3": ("gpt2 tanh", {"engine": ALONE, "dp": 2, "zero_stage": 3}),
    "deepspeed alone llama tp2 dp2 zero3": ("llama tied", {"engine": ALONE, "tp": 2, "dp": 2, "zero_stage": 3}),
    "deepspeed alone bert zero0": ("post-norm bert", {"engine": ALONE}),
    "deepspeed alone t5 tp2 zero1": ("t5", {"engine": ALONE, "tp": 2, "zero_stage": 1}),
    "deepspeed alone t5 dp2 zero2": ("t5 gated", {"engine": ALONE, "dp": 2, "zero_stage": 2}),
}


def make_model(name: str) -> torch.nn.Module:
    """With weights that are nowhere zero or one, biases and norms included."""
    config_class, model_class, fields = MODELS[name]
    torch.manual_seed(5)
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = model_class(config_class(**{"vocab_size": VOCAB} | special | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def architecture(folder: Path) -> Architecture:
    return from_hf_config(json.loads((folder / "config.json").read_text()), "tiny")


def logits(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        more = {"decoder_input_ids": torch.from_numpy(batch["decoder_tokens"])} if "t5" in model.config.model_type else {}
        return model(input_ids=torch.from_numpy(batch["tokens"]), **more).logits.numpy()


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, (2, 32))
    positions = np.tile(np.arange(32), (2, 1))
    return {"tokens": tokens, "decoder_tokens": tokens[:, ::-1].copy(), "labels": np.roll(tokens, -1, axis=1), "positions": positions}


def plan_of(source: Path, export: Path, **fields: Any) -> Plan:
    run = RunSettings(init_from=str(source), export_to=str(export))
    return make_plan(replace(architecture(source)), run=run, micro_batch_size=2, **({"global_batch_size": 8} | fields))


def whole_logits(answers: list[list[np.ndarray]], plan: Plan, index: int) -> np.ndarray:
    """Of the last stage's tensor-parallel ranks, put together; AutoTP's ranks have all of it."""
    if plan.engine == ALONE:
        return answers[0][index]
    first = plan.tp * plan.dp * (plan.pp - 1)
    return np.concatenate([answers[rank][index] for rank in range(first, first + plan.tp)], axis=-1)[..., :VOCAB]


SHORT = ("megatron pp2 vpp2 tied", "deepspeed dp2 zero3", "megatron tp2 pp2 dp2 zero1", "bert tp2 pp2", "deepspeed alone t5 tp2 zero1")
SHORT += ("mixtral tp2 dp2 ep2 etp2", "deepseek tp2 pp2 dp2 ep2 zero1")
"""Run in every gate; the others in the full one."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in SHORT else pytest.mark.full) for case in CASES])
def test_logits_are_the_same_loaded_trained_and_exported(case: str, pool: Pool, tmp_path: Path) -> None:
    name, fields = CASES[case]
    model = make_model(name)
    model.save_pretrained(tmp_path / "source")
    sampled = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(sampled))
    batch = make_batch()
    plan = plan_of(tmp_path / "source", tmp_path / "out", **fields)
    answers = pool.run("exchange", plan.world_size, to_json(plan), batch, str(tmp_path / "out"))
    np.testing.assert_allclose(whole_logits(answers, plan, 0), logits(model, batch), rtol=0, atol=TOLERANCE)

    back = MODELS[name][1].from_pretrained(tmp_path / "out" / "before")
    assert json.loads((tmp_path / "out" / "before" / "generation_config.json").read_text()) == sampled
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    written = architecture(tmp_path / "out" / "before")
    assert replace(written, kv_channels=written.head_dim) == replace(plan.model, kv_channels=plan.model.head_dim)

    trained = MODELS[name][1].from_pretrained(tmp_path / "out" / "after").eval()
    found = logits(trained, batch)
    assert np.abs(found - logits(model, batch)).max() > 100 * TOLERANCE
    np.testing.assert_allclose(whole_logits(answers, plan, 1), found, rtol=0, atol=TOLERANCE)


IN_16_BITS: dict[str, dict[str, Any]] = {"llama": {"engine": DEEPSPEED, "tp": 2, "dp": 2, "zero_stage": 3}, "glm": {}}


@pytest.mark.parametrize("name", ["llama", pytest.param("glm", marks=pytest.mark.full)])
def test_weights_in_16_bits_come_back_as_they_were(name: str, pool: Pool, tmp_path: Path) -> None:
    """The biases that balance experts stay in 32."""
    model = make_model(name)
    biases = {key: buffer.clone() for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")}
    model.to(torch.bfloat16)
    for key, bias in biases.items():
        model.get_submodule(key.rpartition(".")[0]).e_score_correction_bias = bias
    model.save_pretrained(tmp_path / "source")
    plan = plan_of(tmp_path / "source", tmp_path / "out", precision="bf16", **IN_16_BITS[name])
    pool.run("exchange", plan.world_size, to_json(plan), make_batch(), str(tmp_path / "out"))
    back = MODELS[name][1].from_pretrained(tmp_path / "out" / "before")
    assert back.dtype == torch.bfloat16
    source = MODELS[name][1].from_pretrained(tmp_path / "source")  # transformers loads some routers' weights in 32 bits
    for key, tensor in source.state_dict().items():
        assert back.state_dict()[key].dtype == tensor.dtype
        assert torch.equal(back.state_dict()[key], tensor), key


def read_whole(folder: Path, name: str, rows: int) -> torch.Tensor:
    return hf_files.Checkpoint(folder).read(hf_files.Rows(name, 0, rows), (slice(0, 32),), (32,))


@pytest.mark.parametrize("form", ["one file", "several files", "bin", "bin of the bare model"])
def test_every_form_of_checkpoint_is_read(form: str, tmp_path: Path) -> None:
    model = make_model("gpt2")
    if form == "several files":
        model.save_pretrained(tmp_path, max_shard_size="30KB")
        assert (tmp_path / "model.safetensors.index.json").is_file()
    elif form == "one file":
        model.save_pretrained(tmp_path)
    else:
        torch.save((model if form == "bin" else model.transformer).state_dict(), tmp_path / "pytorch_model.bin")
    expected = model.state_dict()
    assert torch.equal(read_whole(tmp_path, "transformer.wte.weight", VOCAB), expected["transformer.wte.weight"])
    rows = hf_files.Rows("transformer.h.1.attn.c_attn.weight", 8, 40, transposed=True)
    part = hf_files.Checkpoint(tmp_path).read(rows, (slice(16, 32),), (32,))
    assert torch.equal(part, expected["transformer.h.1.attn.c_attn.weight"].T[8:40, 16:32])


def test_an_export_in_several_files_is_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_files, "FILE_BYTES", 30_000)
    state = make_model("llama").state_dict()
    (tmp_path / "out").mkdir()
    hf_files.write_files({name: tensor.to("meta") for name, tensor in state.items()}, state.__getitem__, tmp_path / "out")
    MODELS["llama"][0](vocab_size=VOCAB, **LLAMA).save_pretrained(tmp_path / "out")
    back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no weights"):
        hf_files.Checkpoint(tmp_path)
    make_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no tensor transformer\.h\.9\.ln_1\.weight"):
        hf_files.Checkpoint(tmp_path).read(hf_files.Rows("transformer.h.9.ln_1.weight", 0, 32), (), ())
    with pytest.raises(InputError, match=r"wte\.weight has shape \[259, 32\], the model needs \[300, 32\]"):
        read_whole(tmp_path, "transformer.wte.weight", 300)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(InputError, match="can't be read"):
        hf_files.Checkpoint(tmp_path)
